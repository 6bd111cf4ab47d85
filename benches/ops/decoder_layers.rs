//! All layers of a decoder for one token, at the shapes of its cases.

use serde_json::json;
use testkit::compare::relative_l2;
use warpforge::ops::decoder_layers::{
    CASES, DecoderLayers, DecoderLayersArgs, DecoderLayersCase, DecoderLayersProblem, LayerTensors,
    reference, select,
};
use warpforge::ops::rope::RopeTables;
use warpforge::ops::rope::reference::tables;
use warpforge::{DType, Error, Stream, Tensor};

use crate::harness::{Bencher, Failure, Work, expect_close, first_row, floats};

const DTYPE: DType = DType::BF16;
const EPS: f32 = 1e-6;
const HEAD_DIM: usize = reference::HEAD_DIM;
/// How far all layers may be from one after the other: residuals between these are rounded to bf16.
const CHAINED: f64 = 0.05;

struct Layer {
    qkv: Tensor,
    o: Tensor,
    gate_up: Tensor,
    down: Tensor,
    norms: [Tensor; 2],
    qk_norms: [Tensor; 2],
    caches: [Tensor; 2],
}

impl Layer {
    fn new(bencher: &Bencher, case: &DecoderLayersCase, seed: u64) -> Result<Self, Failure> {
        let &DecoderLayersCase { sizes: [hidden, inner], heads: [heads_q, heads_kv], keys, .. } = case;
        let random = |shape: &[usize], salt: u64| bencher.random(shape, DTYPE, 100 * seed + salt);
        let cache = [keys, heads_kv, HEAD_DIM];
        Ok(Layer {
            qkv: random(&[(heads_q + 2 * heads_kv) * HEAD_DIM, hidden], 1)?,
            o: random(&[hidden, heads_q * HEAD_DIM], 2)?,
            gate_up: random(&[2 * inner, hidden], 3)?,
            down: random(&[hidden, inner], 4)?,
            norms: [random(&[hidden], 5)?, random(&[hidden], 6)?],
            qk_norms: [random(&[HEAD_DIM], 7)?, random(&[HEAD_DIM], 8)?],
            caches: [random(&cache, 9)?, random(&cache, 10)?],
        })
    }

    fn tensors(&mut self) -> LayerTensors<'_> {
        let Layer { qkv, o, gate_up, down, norms, qk_norms, caches: [k, v] } = self;
        LayerTensors {
            qkv: qkv.view(),
            o: o.view(),
            gate_up: gate_up.view(),
            down: down.view(),
            input_norm: norms[0].view(),
            post_attention_norm: norms[1].view(),
            q_norm: Some(qk_norms[0].view()),
            k_norm: Some(qk_norms[1].view()),
            k_cache: k.view_mut(),
            v_cache: v.view_mut(),
        }
    }
}

struct Set {
    layers: Vec<Layer>,
    x: Tensor,
    out: Tensor,
}

pub fn bench(bencher: &mut Bencher) {
    for case in CASES {
        bencher.case("decoder_layers", case.name, |bencher| time(bencher, case));
    }
}

fn time(bencher: &mut Bencher, case: &DecoderLayersCase) -> Result<(), Failure> {
    let &DecoderLayersCase { layers, sizes, heads, keys, .. } = case;
    let problem = |layers: usize| DecoderLayersProblem {
        qk_norm: true,
        ..DecoderLayersProblem::new(layers, sizes, heads, keys, DTYPE, EPS)
    };
    let own = problem(layers);
    let work = Work {
        dtype: DTYPE.name(),
        shape: json!({ "layers": layers, "sizes": sizes, "heads": heads, "keys": keys, "eps": EPS }),
        bytes: own.bytes(),
        flops: own.flops(),
    };
    if !bencher.starts(work)? {
        return Ok(());
    }
    // Elsewhere a model has an operator for each part.
    match bencher.device.limits() {
        Some(limits) => select(&limits, &own).map(|_| ())?,
        None => return Err("the CPU has no kernel for it".into()),
    }
    let device = bencher.device.clone();
    let (plan, single) = (DecoderLayers::plan(&device, own)?, DecoderLayers::plan(&device, problem(1))?);
    let inv_freq: Vec<f64> = (0..HEAD_DIM / 2).map(|i| 1e6f64.powf(-(i as f64) / 64.0)).collect();
    let rope_tables = RopeTables::new(&bencher.stream, &inv_freq, 1.0, keys)?;
    let number = |value: usize| Tensor::from_slice(&bencher.stream, &[1], &[value as u32]);
    let (place, len) = (number(keys - 1)?, number(keys)?);
    let mut sets = bencher.sets(|bencher, seed| {
        let layer = |layer: usize| Layer::new(bencher, case, (layers as u64) * seed + layer as u64);
        Ok(Set {
            layers: (0..layers).map(layer).collect::<Result<_, _>>()?,
            x: bencher.random(&[1, sizes[0]], DTYPE, seed)?,
            out: Tensor::empty(&bencher.stream, &[1, sizes[0]], DTYPE)?,
        })
    })?;
    let run_layers =
        |plan: &DecoderLayers, stream: &Stream, layers: &mut [Layer], x: &Tensor, out: &mut Tensor| {
            let mut layers: Vec<LayerTensors<'_>> = layers.iter_mut().map(Layer::tensors).collect();
            let args = DecoderLayersArgs {
                x: x.view(),
                layers: &mut layers,
                positions: place.view(),
                tables: &rope_tables,
                slots: place.view(),
                lens: len.view(),
                pages: None,
                out: out.view_mut(),
            };
            plan.run(stream, args)
        };
    // Layer by layer, of which the first is that of the reference.
    let chained = {
        let Set { layers, x, .. } = &mut sets[0];
        let stream = &bencher.stream;
        let mut rows = first_row(x, stream)?;
        let want = of_first(&layers[0], &rows, &inv_freq, keys, &problem(1), stream)?;
        let mut from = x.try_clone(stream)?;
        for (index, layer) in layers.iter_mut().enumerate() {
            let mut to = Tensor::empty(stream, &[1, sizes[0]], DTYPE)?;
            run_layers(&single, stream, std::slice::from_mut(layer), &from, &mut to)?;
            rows = first_row(&to, stream)?;
            if index == 0 {
                expect_close(DTYPE, &rows, &want)?;
            }
            from = to;
        }
        rows
    };
    let run = |stream: &Stream, Set { layers, x, out }: &mut Set| -> Result<(), Error> {
        run_layers(&plan, stream, layers, x, out)
    };
    let verify = |stream: &Stream, set: &Set| {
        let error = relative_l2(&first_row(&set.out, stream)?, &chained);
        if error <= CHAINED {
            return Ok(());
        }
        Err(format!("relative L2 error {error:.2e} from layers one by one is over {CHAINED}").into())
    };
    bencher.time(&plan.report(), &mut sets, run, verify)
}

/// What the first layer makes of a row.
fn of_first(
    layer: &Layer,
    x: &[f64],
    inv_freq: &[f64],
    keys: usize,
    problem: &DecoderLayersProblem,
    stream: &Stream,
) -> Result<Vec<f64>, Failure> {
    let all = |tensor: &Tensor| floats(tensor.view(), stream);
    let before = |tensor: &Tensor| floats(tensor.view().slice(0, 0..keys - 1)?, stream);
    let (qkv, o, gate_up, down) = (all(&layer.qkv)?, all(&layer.o)?, all(&layer.gate_up)?, all(&layer.down)?);
    let (norms, qk_norms) = (layer.norms.each_ref().map(all), layer.qk_norms.each_ref().map(all));
    let ([input, post], [q_norm, k_norm]) = (norms, qk_norms);
    let (input, post, q_norm, k_norm) = (input?, post?, q_norm?, k_norm?);
    let (k, v) = (before(&layer.caches[0])?, before(&layer.caches[1])?);
    let own = reference::Layer {
        qkv: &qkv,
        o: &o,
        gate_up: &gate_up,
        down: &down,
        input_norm: &input,
        post_attention_norm: &post,
        qk_norms: Some([&q_norm, &k_norm]),
        cache: [&k, &v],
    };
    let (cos, sin) = tables(inv_freq, 1.0, keys);
    let at = (keys - 1) * HEAD_DIM / 2;
    let angles = (&cos[at..], &sin[at..]);
    Ok(reference::decoder_layers::<f64>(x, &[own], angles, problem, |value| value).out)
}
