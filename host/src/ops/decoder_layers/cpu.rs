//! The layers on the CPU: the formula's own loops, in f32. Models have an operator for each part there.

use abi::ops::decoder_layers::DecoderLayersDims;
use half::bf16;

use super::reference::{HEAD_DIM, Layer, decoder_layers};
use super::{DecoderLayersArgs, DecoderLayersProblem};
use crate::tensor::TensorView;

fn floats(view: TensorView<'_>) -> Vec<f64> {
    view.host_slice::<bf16>().iter().map(|value| value.to_f64()).collect()
}

pub(super) fn run(
    problem: &DecoderLayersProblem,
    dims: &DecoderLayersDims,
    args: &mut DecoderLayersArgs<'_>,
) {
    let one = |view: TensorView<'_>| view.host_slice::<u32>()[0];
    let (position, slot) = (one(args.positions).min(dims.max_position - 1), one(args.slots));
    let keys = one(args.lens).min(dims.max_keys).saturating_sub(1);
    let pages = args.pages.map(|pages| pages.host_slice::<u32>().to_vec());
    let slot_of = |key: u32| {
        let Some(pages) = &pages else { return key as usize };
        let page = pages[(key / dims.page_tokens) as usize];
        let is_there = page < dims.num_slots / dims.page_tokens;
        let slot =
            if is_there { page * dims.page_tokens + key % dims.page_tokens } else { dims.num_slots - 1 };
        slot as usize
    };
    let width = problem.heads_kv * HEAD_DIM;
    let stride = dims.slot_stride as usize;
    let angles = |table: TensorView<'_>| -> Vec<f64> {
        let table = table.host_slice::<f32>();
        table[position as usize * (HEAD_DIM / 2)..][..HEAD_DIM / 2].iter().map(|&x| f64::from(x)).collect()
    };
    let (cos, sin) = (angles(args.tables.cos().view()), angles(args.tables.sin().view()));
    let store = |value: f32| bf16::from_f32(value).to_f32();
    let mut x = floats(args.x);
    for layer in args.layers.iter_mut() {
        let rows = |view: TensorView<'_>| -> Vec<f64> {
            let cache = view.host_slice::<bf16>();
            let row = |key| cache[slot_of(key) * stride..][..width].iter().map(|x| x.to_f64());
            (0..keys).flat_map(row).collect()
        };
        let [qkv, o, gate_up, down, input_norm, post_attention_norm] =
            [layer.qkv, layer.o, layer.gate_up, layer.down, layer.input_norm, layer.post_attention_norm]
                .map(floats);
        let (k, v) = (rows(layer.k_cache.as_view()), rows(layer.v_cache.as_view()));
        let norms = layer.q_norm.map(floats).zip(layer.k_norm.map(floats));
        let own = Layer {
            qkv: &qkv,
            o: &o,
            gate_up: &gate_up,
            down: &down,
            input_norm: &input_norm,
            post_attention_norm: &post_attention_norm,
            qk_norms: norms.as_ref().map(|(q, k)| [q.as_slice(), k.as_slice()]),
            cache: [&k, &v],
        };
        let outcome = decoder_layers::<f32>(&x, &[own], (&cos, &sin), problem, store);
        x = outcome.out;
        for (cache, rows) in std::iter::zip([&mut layer.k_cache, &mut layer.v_cache], &outcome.kept[0]) {
            if slot < dims.num_slots {
                let to = &mut cache.host_slice_mut::<bf16>()[slot as usize * stride..][..width];
                for (to, &value) in std::iter::zip(to, rows) {
                    *to = bf16::from_f64(value);
                }
            }
        }
    }
    for (to, value) in std::iter::zip(args.out.host_slice_mut::<bf16>(), x) {
        *to = bf16::from_f64(value);
    }
}
