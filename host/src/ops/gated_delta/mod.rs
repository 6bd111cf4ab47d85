//! The gated delta rule, linear attention with a decayed and corrected state: [`GatedDelta`].

mod cases;
mod cpu;
pub mod reference;
mod select;

use abi::DType;
use abi::ops::gated_delta::{
    CHUNK, GatedDeltaDims, GatedDeltaTile, MAX_DIM_K, PLACE_ELEMENTS, ROWS_IN_PIECES, SLICE, STATE_IN_PIECES,
    VALUE_WORDS, VALUES_IN_PIECES, key_words, parts,
};

use crate::device::{Device, DeviceLimits};
use crate::error::Error;
use crate::kernel::{Work, count};
use crate::launch::Entry;
use crate::ops::check_blocks;
use crate::ops::workspace::Workspace;
use crate::plan::{self, Check, Choice, Operator, Plan, Run, no_float, planned};
use crate::stream::Stream;
use crate::tensor::{Tensor, TensorView, TensorViewMut};

pub use cases::{CASES, GatedDeltaCase, samples};
pub use select::{Form, MAX_RECURRENT_TOKENS, select};

const OP: &str = "gated_delta";

/// What is to be computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GatedDeltaProblem {
    /// Most tokens of a run, over all sequences.
    pub tokens: usize,
    /// Most sequences of a run.
    pub sequences: usize,
    /// Most tokens of a sequence, as far as is known: what the form is chosen by. A run with more is right too.
    pub longest: usize,
    /// Heads of q and k.
    pub heads_k: usize,
    /// Heads of v and of the state, a multiple of `heads_k`: value head h uses key head `h / (heads_v / heads_k)`.
    pub heads_v: usize,
    /// Elements of a key head: up to 128.
    pub dim_k: usize,
    /// Elements of a value head.
    pub dim_v: usize,
    /// Type of q, k, v, b, a and out.
    pub dtype: DType,
}

impl GatedDeltaProblem {
    /// With what it must have. The other fields do nothing: `longest: tokens`.
    pub fn new(
        tokens: usize,
        sequences: usize,
        [heads_k, heads_v]: [usize; 2],
        [dim_k, dim_v]: [usize; 2],
        dtype: DType,
    ) -> Self {
        GatedDeltaProblem { tokens, sequences, longest: tokens, heads_k, heads_v, dim_k, dim_v, dtype }
    }
}

/// The tensors of a run. Stride 1 in the last dimension.
#[derive(Debug)]
pub struct GatedDeltaArgs<'a> {
    /// `[tokens, heads_k, dim_k]`: the sequences' tokens, one sequence after the other. Before its norm.
    pub q: TensorView<'a>,
    /// `[tokens, heads_k, dim_k]`, before its norm.
    pub k: TensorView<'a>,
    /// `[tokens, heads_v, dim_v]`.
    pub v: TensorView<'a>,
    /// `[tokens, heads_v]`: how much of a correction is made, before the sigmoid.
    pub b: TensorView<'a>,
    /// `[tokens, heads_v]`: how much is forgotten, before `dt_bias` and the softplus.
    pub a: TensorView<'a>,
    /// `[heads_v]` f32.
    pub a_log: TensorView<'a>,
    /// `[heads_v]` f32.
    pub dt_bias: TensorView<'a>,
    /// `[sequences + 1]` u32: sequence s has the tokens `offsets[s]..offsets[s + 1]`. They do not fall, and are at most
    /// the number of tokens; a token in none of them is left out.
    pub offsets: TensorView<'a>,
    /// `[sequences]` u32: where each sequence's state is. Distinct; a sequence whose slot is beyond the state is
    /// skipped.
    pub slots: TensorView<'a>,
    /// `[slots, heads_v, dim_k, dim_v]` f32, the last three dimensions contiguous. Read and brought up to date; zeros
    /// before a sequence's first token. A copy of a slot is a copy of the sequence.
    pub state: TensorViewMut<'a>,
    /// `[tokens, heads_v, dim_v]`.
    pub out: TensorViewMut<'a>,
}

impl<'a> GatedDeltaArgs<'a> {
    /// With what it must have, which is all there is so far.
    pub fn new(
        [q, k, v]: [TensorView<'a>; 3],
        [b, a]: [TensorView<'a>; 2],
        [a_log, dt_bias]: [TensorView<'a>; 2],
        [offsets, slots]: [TensorView<'a>; 2],
        state: TensorViewMut<'a>,
        out: TensorViewMut<'a>,
    ) -> Self {
        GatedDeltaArgs { q, k, v, b, a, a_log, dt_bias, offsets, slots, state, out }
    }
}

/// The gated delta rule: linear attention whose state is decayed and corrected by each token, over packed sequences.
///
/// For each value head, with q and k of its key head, and from token to token:
///
/// ```text
/// β = sigmoid(b)    g = −exp(a_log) · softplus(a + dt_bias)
/// q ← q · rsqrt(Σq² + 1e-6) · dim_k^−½    k ← k · rsqrt(Σk² + 1e-6)
/// S ← e^g · S
/// S ← S + k ⊗ β (v − Sᵀ k)
/// out = Sᵀ q
/// ```
///
/// **Arithmetic**: f32 throughout, the state too; out is rounded once. softplus(x) is x from 20 on, and a g below −256
/// counts as −256, whose e^g is 0; of any finite `a_log`, a and `dt_bias` g is a number. Where the sizes of a sum's
/// terms add up to more than 3.4e38, the state and what is read of it may be infinite or NaN. **Forms**: the recurrence
/// as it stands where `longest` is at most [`MAX_RECURRENT_TOKENS`], else chunks of 64 tokens as matrix products, which
/// is another order of the same sums (on tensor cores, for f16 and bf16 from sm_80 on, of numbers as sums of three of
/// bf16): there a decay over up to 64 tokens is one number, which below 2⁻¹⁴⁹ is 0, where token by token something of a
/// huge value can be left. Sums over |q|² and |k|² must stay below 3e38. **Determinism**: bitwise the same from run to
/// run; a sequence's result does not depend on the other sequences. How it is cut into runs can change the last bits in
/// the chunked form, not in the recurrent one, nor on the CPU; so the recurrent one is chosen for any length under
/// [`Invariance::Batch`](crate::Invariance::Batch). **Special values**: a NaN or infinity reaches no earlier token, no
/// other head or sequence, and from v no other column. **Streams**: a plan of the chunked form has a workspace, so a
/// run in another stream than the last one waits for that. A recorded graph does not know of later runs: do not let it
/// run at the same time as the plan in another stream, nor outlive the plan. **Aliasing**: out and state may not
/// overlap the other tensors. **Graphs**: offsets and slots are read when the kernels run. **Errors**:
/// [`Error::Invalid`] for a shape, stride, type or place that does not fit; never after work was enqueued.
/// **Architectures**: the same kernels on all floors, and others for chunks of f16 and bf16 from sm_80 on. **Source**:
/// Yang et al., *Gated Delta Networks* (2024), equation 10; the chunked form as in section 3.3 there and in Yang et
/// al., *Parallelizing Linear Transformers with the Delta Rule over Sequence Length* (2024), section 3.
///
/// ```no_run
/// # extern crate host as warpforge;
/// use warpforge::{Device, DType, Tensor, ops::gated_delta::*};
///
/// # fn main() -> Result<(), host::Error> {
/// let device = Device::cpu();
/// let stream = device.stream()?;
/// let problem = GatedDeltaProblem {
///     tokens: 2048, sequences: 1, longest: 2048, heads_k: 16, heads_v: 32, dim_k: 128, dim_v: 128, dtype: DType::BF16,
/// };
/// let gated_delta = GatedDelta::plan(&device, problem)?;
/// let q = Tensor::zeros(&stream, &[2048, 16, 128], DType::BF16)?;
/// let v = Tensor::zeros(&stream, &[2048, 32, 128], DType::BF16)?;
/// let gates = Tensor::zeros(&stream, &[2048, 32], DType::BF16)?;
/// let weights = Tensor::zeros(&stream, &[32], DType::F32)?;
/// let offsets = Tensor::from_slice(&stream, &[2], &[0u32, 2048])?;
/// let slots = Tensor::from_slice(&stream, &[1], &[0u32])?;
/// let mut state = Tensor::zeros(&stream, &[1, 32, 128, 128], DType::F32)?;
/// let mut out = Tensor::empty(&stream, &[2048, 32, 128], DType::BF16)?;
/// let args = GatedDeltaArgs {
///     q: q.view(), k: q.view(), v: v.view(), b: gates.view(), a: gates.view(), a_log: weights.view(),
///     dt_bias: weights.view(), offsets: offsets.view(), slots: slots.view(), state: state.view_mut(),
///     out: out.view_mut(),
/// };
/// gated_delta.run(&stream, args)?;
/// println!("{}", gated_delta.report());
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct GatedDelta(Plan<Self>);

planned!(
    GatedDelta,
    GatedDeltaProblem,
    GatedDeltaArgs { q, k, v, b, a, a_log, dt_bias, offsets, slots, state, out },
    Form
);

/// The kernels of a form.
#[derive(Debug)]
pub(crate) enum Kernels {
    Recurrent(Entry),
    Chunked(Box<Chunked>),
}

#[derive(Debug)]
pub(crate) struct Chunked {
    chunk: Entry,
    scan: Entry,
    /// Most places of a pass.
    pass: u32,
    /// On tensor cores; they load k and q in the first alone.
    is_mma: bool,
    /// What the first leaves for the second, for each place of a pass.
    workspace: Workspace<1>,
}

impl plan::Kernels for Kernels {
    fn reported(&self) -> &Entry {
        match self {
            Kernels::Recurrent(entry) => entry,
            Kernels::Chunked(chunked) => &chunked.scan,
        }
    }
}

impl Operator for GatedDelta {
    const OP: &'static str = OP;
    const CPU_TILE: &'static str = "heads";
    type Problem = GatedDeltaProblem;
    type Args<'a> = GatedDeltaArgs<'a>;
    type Dims = GatedDeltaDims;
    type Variant = Form;
    type Kernels = Kernels;

    fn check_problem(problem: &GatedDeltaProblem) -> Result<(), Error> {
        let GatedDeltaProblem { tokens, sequences, longest: _, heads_k, heads_v, dim_k, dim_v, dtype } =
            *problem;
        let invalid = |expected: &str, got: String| Err(Error::invalid(OP, "problem", expected, got));
        // Places are counted in u32.
        for (what, size) in [("tokens", tokens), ("sequences", sequences)] {
            if size >= 1 << 30 {
                return invalid(&format!("{what} below 2^30"), size.to_string());
            }
        }
        if heads_k == 0 || heads_v == 0 || !heads_v.is_multiple_of(heads_k) {
            let expected = "heads_v a multiple of heads_k, both at least 1";
            return invalid(expected, format!("{heads_v} and {heads_k}"));
        }
        if !(1..=MAX_DIM_K as usize).contains(&dim_k) {
            return invalid("dim_k from 1 to 128", dim_k.to_string());
        }
        if dim_v == 0 || heads_v.saturating_mul(dim_v) >= 1 << 24 {
            return invalid(
                "dim_v at least 1, and heads_v · dim_v below 2^24",
                format!("{heads_v} · {dim_v}"),
            );
        }
        if dtype.is_float() { Ok(()) } else { Err(no_float(OP, dtype)) }
    }

    fn select(limits: &DeviceLimits, problem: &GatedDeltaProblem) -> Result<Choice<Form>, Error> {
        select(limits, problem)
    }

    fn forced(form: Form, problem: &GatedDeltaProblem) -> Result<Choice<Form>, Error> {
        let dtype = problem.dtype;
        if matches!(form, Form::ChunkedMma { .. }) && !select::on_tensor_cores(dtype) {
            return Err(Error::invalid(
                OP,
                "variant",
                "f16 or bf16 for chunks on tensor cores",
                dtype.name(),
            ));
        }
        Ok(Choice::asked_for(form, form.main().threads()))
    }

    fn load(device: &Device, problem: &GatedDeltaProblem, choice: &Choice<Form>) -> Result<Kernels, Error> {
        let load = |tile: GatedDeltaTile| {
            let variant = select::variant(problem.dtype, tile)?;
            device.entry(OP, variant.entry, tile.smem_bytes())
        };
        let GatedDeltaProblem { heads_k, heads_v, dtype, .. } = *problem;
        let (pass, is_mma) = match choice.variant {
            Form::Recurrent => return Ok(Kernels::Recurrent(load(GatedDeltaTile::Recurrent)?)),
            Form::Chunked { pass } => (pass, false),
            Form::ChunkedMma { pass } => (pass, true),
        };
        let (chunk, scan, of_place) = if is_mma {
            let of_place = heads_k * key_words(parts(dtype)) as usize + heads_v * VALUE_WORDS as usize;
            (GatedDeltaTile::ChunkMma, GatedDeltaTile::ScanMma, of_place)
        } else {
            (GatedDeltaTile::Chunk, GatedDeltaTile::Scan, heads_v * PLACE_ELEMENTS as usize)
        };
        let pass = pass.clamp(1, places(problem.tokens as u32, problem.sequences as u32).max(1));
        let elements = pass as usize * of_place;
        let tensors = |stream: &_| Ok([Tensor::empty(stream, &[elements], DType::F32)?]);
        let (chunk, scan) = (load(chunk)?, load(scan)?);
        let workspace = Workspace::new(device, tensors)?;
        Ok(Kernels::Chunked(Box::new(Chunked { chunk, scan, pass, is_mma, workspace })))
    }

    fn check(
        at: &Check<'_>,
        problem: &GatedDeltaProblem,
        args: &GatedDeltaArgs<'_>,
    ) -> Result<GatedDeltaDims, Error> {
        let GatedDeltaArgs { q, k, v, b, a, a_log, dt_bias, offsets, slots, state, out } = args;
        let GatedDeltaProblem { heads_k, heads_v, dim_k, dim_v, dtype, .. } = *problem;
        let [q_token_stride, q_head_stride] = at.rows("q", *q, dtype, &[None, Some(heads_k), Some(dim_k)])?;
        let tokens = q.shape()[0];
        let keys = &[tokens, heads_k, dim_k].map(Some);
        let [k_token_stride, k_head_stride] = at.rows("k", *k, dtype, keys)?;
        let rows_in_pieces = at.is_aligned();
        let values = &[tokens, heads_v, dim_v].map(Some);
        let [v_token_stride, v_head_stride] = at.elements("v", *v, dtype, values)?;
        let [b_stride] = at.elements("b", *b, dtype, &[tokens, heads_v].map(Some))?;
        let [a_stride] = at.elements("a", *a, dtype, &[tokens, heads_v].map(Some))?;
        let [] = at.elements("a_log", *a_log, DType::F32, &[Some(heads_v)])?;
        let [] = at.elements("dt_bias", *dt_bias, DType::F32, &[Some(heads_v)])?;
        let [] = at.elements("slots", *slots, DType::U32, &[None])?;
        let sequences = slots.shape()[0];
        let [] = at.elements("offsets", *offsets, DType::U32, &[Some(sequences + 1)])?;
        let state_shape = [None, Some(heads_v), Some(dim_k), Some(dim_v)];
        let slot_stride = at.stack("state", state.as_view(), DType::F32, &state_shape)?;
        let [out_token_stride, out_head_stride] = at.elements("out", out.as_view(), dtype, values)?;
        let flag = |holds: bool, flag: u32| if holds { flag } else { 0 };
        Ok(GatedDeltaDims {
            tokens: at.planned("q", "tokens", tokens, problem.tokens)?,
            sequences: at.planned("slots", "sequences", sequences, problem.sequences)?,
            num_slots: at.size("state", "number of slots", state.shape()[0])?,
            heads_v: heads_v as u32,
            group: (heads_v / heads_k) as u32,
            dim_k: dim_k as u32,
            dim_v: dim_v as u32,
            slices: (dim_v as u32).div_ceil(SLICE),
            access: flag(rows_in_pieces, ROWS_IN_PIECES)
                | flag(state.is_aligned_16(), STATE_IN_PIECES)
                | flag(v.is_aligned_16() && out.is_aligned_16(), VALUES_IN_PIECES),
            first_place: 0,
            num_places: 0,
            q_token_stride,
            q_head_stride,
            k_token_stride,
            k_head_stride,
            v_token_stride,
            v_head_stride,
            b_stride,
            a_stride,
            out_token_stride,
            out_head_stride,
            slot_stride,
            scale: 1.0 / (dim_k as f32).sqrt(),
        })
    }

    fn cpu(problem: &GatedDeltaProblem, dims: &GatedDeltaDims, args: &mut GatedDeltaArgs<'_>) {
        if dims.tokens > 0 {
            cpu::run(problem.dtype, dims, args);
        }
    }

    fn launch(run: &Run<'_, Self>, dims: GatedDeltaDims, args: &GatedDeltaArgs<'_>) -> Result<(), Error> {
        if dims.sequences == 0 || dims.tokens == 0 {
            return Ok(());
        }
        let entry = match run.kernels {
            Kernels::Recurrent(entry) => entry,
            Kernels::Chunked(chunked) => return chunked.run(run.stream, args, dims),
        };
        let GatedDeltaArgs { q, k, v, b, a, a_log, dt_bias, offsets, slots, state, out } = args;
        let grid = blocks(&[dims.sequences, dims.heads_v, dims.slices])?;
        let params = [
            (*q).into(),
            (*k).into(),
            (*v).into(),
            (*b).into(),
            (*a).into(),
            (*a_log).into(),
            (*dt_bias).into(),
            (*offsets).into(),
            (*slots).into(),
            state.into(),
            out.into(),
            (&dims).into(),
        ];
        let threads = GatedDeltaTile::Recurrent.threads();
        // SAFETY: `check` found every row of every tensor inside its view, and `access` what is read in pieces of 16
        // bytes; the kernel takes no token beyond them and leaves out slots beyond the state.
        unsafe { entry.launch(run.stream, [grid, 1, 1], [threads, 1, 1], &params) }
    }

    fn work(problem: &GatedDeltaProblem) -> Work {
        let GatedDeltaProblem { tokens, sequences, heads_k, heads_v, dim_k, dim_v, dtype, .. } = *problem;
        let [tokens, sequences] = [tokens, sequences].map(count);
        let [heads_k, heads_v, dim_k, dim_v] = [heads_k, heads_v, dim_k, dim_v].map(count);
        let rows = count(2) * tokens * (heads_k * dim_k + heads_v * dim_v + heads_v);
        let states = sequences * heads_v * dim_k * dim_v;
        Work {
            problem: format!(
                "[{tokens}, {heads_v}, {dim_v}] {dtype}, {heads_k} key heads of {dim_k}, {sequences} sequences"
            ),
            bytes: rows * count(dtype.bytes()) + count(2 * DType::F32.bytes()) * states,
            // Of the recurrence: decay, prediction, correction and output.
            flops: count(7) * tokens * heads_v * dim_k * dim_v,
        }
    }

    fn tile(_: &Device, _: &GatedDeltaProblem, choice: &Choice<Form>) -> String {
        format!("{:?}", choice.variant.main())
    }
}

impl Chunked {
    fn run(&self, stream: &Stream, args: &GatedDeltaArgs<'_>, mut dims: GatedDeltaDims) -> Result<(), Error> {
        let GatedDeltaArgs { q, k, v, b, a, a_log, dt_bias, offsets, slots, state, out } = args;
        let scan_grid = blocks(&[dims.sequences, dims.heads_v, dims.slices])?;
        let [workspace] = &self.workspace.tensors;
        let workspace = workspace.view();
        let places = places(dims.tokens, dims.sequences);
        let _alone = self.workspace.enter(stream)?;
        while dims.first_place < places {
            dims.num_places = (places - dims.first_place).min(self.pass);
            let chunk_grid = blocks(&[dims.num_places, dims.heads_v])?;
            let chunk_params = [
                (*q).into(),
                (*k).into(),
                (*b).into(),
                (*a).into(),
                (*a_log).into(),
                (*dt_bias).into(),
                (*offsets).into(),
                workspace.into(),
                (&dims).into(),
            ];
            let scan_params = [
                (*q).into(),
                (*k).into(),
                (*v).into(),
                (*offsets).into(),
                (*slots).into(),
                state.into(),
                out.into(),
                workspace.into(),
                (&dims).into(),
            ];
            let (chunk, scan) = (GatedDeltaTile::Chunk.threads(), GatedDeltaTile::Scan.threads());
            // SAFETY: as for the recurrent form; the workspace has room for the places of a pass, of which a run of at
            // most the planned tokens and sequences has no more, and no run of another stream uses it until this one is
            // done.
            unsafe {
                self.chunk.launch(stream, [chunk_grid, 1, 1], [chunk, 1, 1], &chunk_params)?;
                // Of which those on tensor cores have no k and q.
                let params = &scan_params[if self.is_mma { 2 } else { 0 }..];
                self.scan.launch(stream, [scan_grid, 1, 1], [scan, 1, 1], params)?;
            }
            dims.first_place += dims.num_places;
        }
        Ok(())
    }
}

/// Places of the chunks of so many tokens and sequences: see `abi::ops::gated_delta::CHUNK`.
fn places(tokens: u32, sequences: u32) -> u32 {
    tokens / CHUNK + sequences
}

/// Blocks altogether.
fn blocks(factors: &[u32]) -> Result<u32, Error> {
    check_blocks(OP, "q", factors.iter().map(|&factor| u64::from(factor)).product())
}
