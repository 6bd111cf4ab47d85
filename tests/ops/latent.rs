//! Latent attention, which is several operators: its naive form and its absorbed form are the same function.
//!
//! A token's cache row is `c | k_rope`. Naive: `k = W_UK·c | k_rope` and `v = W_UV·c` for every head, then attention.
//! Absorbed: `W_UK` goes to the query and `W_UV` to the result, so that attention is against the cache rows themselves,
//! of which the first columns are the values.

use proptest::prelude::*;
use proptest::sample::select;
use testkit::round::{encode, round_to};
use testkit::strategies::{Values, dims};
use warpforge::ops::attention::reference::{Options, Sequence, attention};
use warpforge::ops::attention::{
    Attention, AttentionArgs, AttentionProblem, KvScales, Mask, Offsets, ScoreTensors, Scores,
};
use warpforge::ops::copy::{Copy, CopyArgs, CopyProblem};
use warpforge::ops::matmul::reference::matmul;
use warpforge::ops::matmul::{Matmul, MatmulArgs, MatmulProblem};
use warpforge::{DType, Device, Error, Stream, Tensor, TensorView};

use crate::harness::{fail, floats, on_executors, store, values};

#[derive(Clone, Debug)]
struct Case {
    dtype: DType,
    heads: usize,
    /// Queries, the last of the cached tokens.
    seq_q: usize,
    len: usize,
    /// Widths of a head's key without rotation and with, of its value, and of the latent row.
    nope: usize,
    rope: usize,
    value: usize,
    latent: usize,
    seed: u64,
}

fn case() -> impl Strategy<Value = Case> {
    // GLM-4.7-Flash, the golden checkpoint, and between them.
    let widths = select(vec![(192, 64, 256, 512), (24, 16, 32, 32), (64, 32, 40, 128), (128, 64, 128, 512)]);
    (floats(), 1usize..6, 1usize..8, dims(&[16, 64], 100), widths, any::<u64>()).prop_map(
        |(dtype, heads, seq_q, cached, (nope, rope, value, latent), seed)| {
            let len = (cached + 1).max(seq_q);
            Case { dtype, heads, seq_q, len, nope, rope, value, latent, seed }
        },
    )
}

/// q `[seq_q, heads, nope + rope]`, cache rows `[len, latent + rope]`, `W_UK` `[heads, nope, latent]` and `W_UV`
/// `[heads, value, latent]`.
struct Data {
    q: Vec<f64>,
    cache: Vec<f64>,
    w_uk: Vec<f64>,
    w_uv: Vec<f64>,
}

/// Results whose errors are compared, at least.
const SAMPLE: usize = 512;

impl Case {
    /// Draws of the data that make up a sample.
    fn draws(&self) -> usize {
        SAMPLE.div_ceil(self.seq_q * self.heads * self.value)
    }

    fn work(&self) -> usize {
        let products = self.heads * (self.nope + self.value) * (2000 + 4 * self.latent);
        products * (2 + self.len.div_ceil(16)) / 4
            + 2 * self.heads * 64 * self.len.next_multiple_of(64) * (16 + self.latent / 2)
    }

    fn scale(&self) -> f32 {
        1.0 / ((self.nope + self.rope) as f32).sqrt()
    }

    fn data(&self) -> Data {
        let Case { dtype, heads, seq_q, len, nope, rope, value, latent, seed } = *self;
        let normal = |count, seed| values(Values::Normal, dtype, count, seed);
        // Weights scaled as trained ones are: results of the same size as what they are made of.
        let weights = |count, seed| -> Vec<f64> {
            let scale = (latent as f64).powf(-0.5);
            normal(count, seed).into_iter().map(|weight| round_to(dtype, weight * scale)).collect()
        };
        Data {
            q: normal(seq_q * heads * (nope + rope), seed),
            cache: normal(len * (latent + rope), seed ^ 1),
            w_uk: weights(heads * nope * latent, seed ^ 2),
            w_uv: weights(heads * value * latent, seed ^ 3),
        }
    }

    /// The naive form as plain loops, `[seq_q, heads, value]`.
    fn reference<A: warpforge::ops::reference::Real>(&self, data: &Data, store: impl Fn(A) -> A) -> Vec<f64> {
        let Case { heads, seq_q, len, nope, rope, value, latent, .. } = *self;
        let columns = |from: usize, to: usize| -> Vec<f64> {
            data.cache.chunks(latent + rope).flat_map(|row| &row[from..to]).copied().collect()
        };
        let (c, k_rope) = (columns(0, latent), columns(latent, latent + rope));
        let k_nope = matmul::<A>(&c, &data.w_uk, None, [len, heads * nope, latent], &store);
        let v = matmul::<A>(&c, &data.w_uv, None, [len, heads * value, latent], &store);
        let mut k = Vec::new();
        for (index, head) in k_nope.chunks(nope).enumerate() {
            k.extend_from_slice(head);
            k.extend_from_slice(&k_rope[index / heads * rope..][..rope]);
        }
        let sequence = Sequence {
            seq_q,
            len,
            heads_q: heads,
            heads_kv: heads,
            head_dim: nope + rope,
            head_dim_v: value,
            scale: f64::from(self.scale()),
            mask: Mask::Causal,
            window: None,
            options: Options::default(),
        };
        attention::<A>(&sequence, &data.q, &k, &v, &store).0
    }
}

/// The operators of a case on a device.
struct Run<'a> {
    case: &'a Case,
    device: &'a Device,
    stream: Stream,
}

impl Run<'_> {
    fn tensor(&self, shape: &[usize], values: &[f64]) -> Result<Tensor, Error> {
        Tensor::from_bytes(&self.stream, shape, self.case.dtype, &encode(self.case.dtype, values))
    }

    fn empty(&self, shape: &[usize]) -> Result<Tensor, Error> {
        Tensor::empty(&self.stream, shape, self.case.dtype)
    }

    fn copy(
        &self,
        src: TensorView<'_>,
        dst: &mut Tensor,
        columns: std::ops::Range<usize>,
    ) -> Result<(), Error> {
        let (dtype, elements) = (self.case.dtype, src.len());
        let axis = dst.shape().len() - 1;
        let dst = dst.view_mut().slice(axis, columns)?;
        Copy::plan(self.device, CopyProblem { elements, src: dtype, dst: dtype })?
            .run(&self.stream, CopyArgs { src, dst })
    }

    /// `out[b] = a[b] · w[b]ᵀ`; out's batch and rows are its second and first axis.
    fn per_head(
        &self,
        a: TensorView<'_>,
        w: &Tensor,
        out: warpforge::TensorViewMut<'_>,
    ) -> Result<(), Error> {
        let dtype = self.case.dtype;
        let [batch, n, k] = *w.shape() else { panic!("a stack of weights") };
        let m = a.shape()[0];
        let problem = MatmulProblem { batch, ..MatmulProblem::new(m, n, k, dtype) };
        let (a, out) = (a.swap_axes(0, 1)?, out.swap_axes(0, 1)?);
        Matmul::plan(self.device, problem)?.run(&self.stream, MatmulArgs::new(a, w.view(), out))
    }

    fn attend(
        &self,
        (heads_kv, head_dim, head_dim_v): (usize, usize, usize),
        q: &Tensor,
        k: TensorView<'_>,
        v: TensorView<'_>,
        out: &mut Tensor,
    ) -> Result<(), Error> {
        let Case { dtype, heads, seq_q, len, .. } = *self.case;
        let problem = AttentionProblem {
            batch: 1,
            seq_q,
            seq_kv: len,
            heads_q: heads,
            heads_kv,
            head_dim,
            head_dim_v,
            dtype,
            dtype_kv: dtype,
            scale: Some(self.case.scale()),
            mask: Mask::Causal,
            window: None,
            scores: Scores::default(),
            page_size: None,
        };
        let args = AttentionArgs {
            q: q.view().reshape(&[1, seq_q, heads, head_dim])?,
            k: k.reshape(&[1, len, heads_kv, head_dim])?,
            v: v.reshape(&[1, len, heads_kv, head_dim_v])?,
            kv_lens: None,
            kv_scales: KvScales::default(),
            out: out.view_mut().reshape(&[1, seq_q, heads, head_dim_v])?,
            lse: None,
            scores: ScoreTensors::default(),
            offsets: Offsets::default(),
            page_table: None,
        };
        Attention::plan(self.device, problem)?.run(&self.stream, args)
    }

    fn read(&self, tensor: &Tensor) -> Result<Vec<f64>, Error> {
        Ok(tensor.to_f32_vec(&self.stream)?.into_iter().map(f64::from).collect())
    }

    fn naive(&self, data: &Data) -> Result<Vec<f64>, Error> {
        let Case { heads, seq_q, len, nope, rope, value, latent, .. } = *self.case;
        let q = self.tensor(&[seq_q, heads, nope + rope], &data.q)?;
        let cache = self.tensor(&[len, latent + rope], &data.cache)?;
        let (w_uk, w_uv) = (
            self.tensor(&[heads, nope, latent], &data.w_uk)?,
            self.tensor(&[heads, value, latent], &data.w_uv)?,
        );
        let (mut k, mut v) = (self.empty(&[len, heads, nope + rope])?, self.empty(&[len, heads, value])?);
        let columns = |from: usize, to: usize| {
            cache.view().slice(1, from..to)?.reshape(&[len, 1, to - from])?.repeat(1, heads)
        };
        self.per_head(columns(0, latent)?, &w_uk, k.view_mut().slice(2, 0..nope)?)?;
        self.per_head(columns(0, latent)?, &w_uv, v.view_mut())?;
        self.copy(columns(latent, latent + rope)?, &mut k, nope..nope + rope)?;
        let mut out = self.empty(&[seq_q, heads, value])?;
        self.attend((heads, nope + rope, value), &q, k.view(), v.view(), &mut out)?;
        self.read(&out)
    }

    fn absorbed(&self, data: &Data) -> Result<Vec<f64>, Error> {
        let Case { heads, seq_q, len, nope, rope, value, latent, .. } = *self.case;
        let transposed: Vec<f64> = data
            .w_uk
            .chunks(nope * latent)
            .flat_map(|head| (0..latent).flat_map(move |col| head.iter().skip(col).step_by(latent)))
            .copied()
            .collect();
        let w_uk = self.tensor(&[heads, latent, nope], &transposed)?;
        let w_uv = self.tensor(&[heads, value, latent], &data.w_uv)?;
        let q = self.tensor(&[seq_q, heads, nope + rope], &data.q)?;
        let cache = self.tensor(&[len, latent + rope], &data.cache)?;
        let mut absorbed = self.empty(&[seq_q, heads, latent + rope])?;
        self.per_head(q.view().slice(2, 0..nope)?, &w_uk, absorbed.view_mut().slice(2, 0..latent)?)?;
        self.copy(q.view().slice(2, nope..nope + rope)?, &mut absorbed, latent..latent + rope)?;
        let mut attended = self.empty(&[seq_q, heads, latent])?;
        let (k, v) = (cache.view(), cache.view().slice(1, 0..latent)?);
        self.attend((1, latent + rope, latent), &absorbed, k, v, &mut attended)?;
        let mut out = self.empty(&[seq_q, heads, value])?;
        self.per_head(attended.view(), &w_uv, out.view_mut())?;
        self.read(&out)
    }
}

fn relative_l2(got: &[f64], want: &[f64]) -> f64 {
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|value| value * value).sum::<f64>().sqrt();
    norm(&mut std::iter::zip(got, want).map(|(got, want)| got - want)) / norm(&mut want.iter().copied())
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// Both forms err at most twice as much as the naive form done naively in the storage type, over as many draws of
    /// the data as make up [`SAMPLE`] results: the errors of few may be next to nothing by chance.
    #[test]
    fn both_forms_are_latent_attention((case, on) in on_executors(case, |case| case.draws() * case.work())) {
        let cases: Vec<Case> =
            (0..case.draws()).map(|draw| Case { seed: case.seed ^ (draw as u64) << 8, ..case.clone() }).collect();
        let data: Vec<Data> = cases.iter().map(Case::data).collect();
        let of_all = |result: &dyn Fn(&Case, &Data) -> Vec<f64>| -> Vec<f64> {
            std::iter::zip(&cases, &data).flat_map(|(case, data)| result(case, data)).collect()
        };
        let want = of_all(&|case, data| case.reference::<f64>(data, |value| value));
        let naive = of_all(&|case, data| case.reference::<f32>(data, store(case.dtype)));
        let allowed = 2.0 * relative_l2(&naive, &want);
        for device in &on.devices() {
            let (mut naive, mut absorbed) = (Vec::new(), Vec::new());
            for (case, data) in std::iter::zip(&cases, &data) {
                let run = Run { case, device, stream: device.stream().map_err(fail)? };
                naive.extend(run.naive(data).map_err(fail)?);
                absorbed.extend(run.absorbed(data).map_err(fail)?);
            }
            for (form, got) in [("naive", naive), ("absorbed", absorbed)] {
                let error = relative_l2(&got, &want);
                prop_assert!(error <= allowed, "{form} on {device:?}: {error:.3e}, allowed {allowed:.3e}");
            }
        }
    }
}
