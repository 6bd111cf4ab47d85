//! The experts on the CPU, token by token: the elements of its experts in parallel, then the columns of out.

use std::cell::RefCell;

use abi::DType;
use abi::exact::sigmoid;
use abi::ops::fused_moe::FusedMoeDims;
use half::{bf16, f16};

use super::{FusedMoeArgs, FusedMoeProblem};
use crate::ops::Store;
use crate::ops::glu::cpu::activate;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::ops::rmsnorm::cpu::NormedRow;
use crate::simd::{LANES, Lanes, Work, by_best, load_rest};
use crate::tensor::FloatElement;

thread_local! {
    /// A row of x, and the rows between the products, in their own type.
    static ROWS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

pub(super) fn run(problem: &FusedMoeProblem, dims: &FusedMoeDims, args: &mut FusedMoeArgs<'_>) {
    match problem.dtype {
        DType::F16 => of_type::<f16>(problem, dims, args),
        DType::BF16 => of_type::<bf16>(problem, dims, args),
        _ => of_type::<f32>(problem, dims, args),
    }
}

/// An expert of a token.
struct Slot<'a, T> {
    gate_up: &'a [T],
    gate_up_stride: usize,
    down: &'a [T],
    down_stride: usize,
    weight: f32,
}

fn of_type<T: FloatElement>(problem: &FusedMoeProblem, dims: &FusedMoeDims, args: &mut FusedMoeArgs<'_>) {
    let FusedMoeProblem { top_k, experts, hidden, inner, activation, norm, store, .. } = *problem;
    let (tokens, slots) = (args.out.shape()[0], dims.slots as usize);
    if tokens * hidden == 0 {
        return;
    }
    let (ids, weights) = (args.ids.host_slice::<u32>(), args.weights.host_slice::<f32>());
    let (gate_up, down) = (args.gate_up.host_slice::<T>(), args.down.host_slice::<T>());
    let shared_gate_up = args.shared_gate_up.as_ref().map_or(&[][..], |rows| rows.host_slice::<T>());
    let shared_down = args.shared_down.as_ref().map_or(&[][..], |rows| rows.host_slice::<T>());
    let gate = args.gate.as_ref().map(|gate| gate.host_slice::<f32>());
    let x = args.x.as_ref().map(|x| x.host_slice::<T>());
    let gain = args.gain.as_ref().map(|gain| gain.host_slice::<T>());
    let out = args.out.host_slice_mut::<T>();
    // A thread that waits may do other work, which finds no rows and makes its own.
    let mut own = ROWS.take();
    let elements = hidden + slots * inner;
    own.resize(own.len().max(elements), 0.0);
    let rows = &mut bytemuck::cast_slice_mut::<f32, T>(&mut own)[..elements];
    let (row, between) = rows.split_at_mut(hidden);
    for token in 0..tokens {
        let from = match x {
            Some(x) => &x[token * dims.x_stride as usize..][..hidden],
            None => &out[token * dims.out_stride as usize..][..hidden],
        };
        match (norm, gain) {
            (Some(norm), Some(weight)) => by_best(NormedRow {
                from: Some(from),
                weight,
                weight_offset: norm.weight.offset(),
                inv_cols: 1.0 / hidden as f32,
                eps: norm.eps,
                gate: None,
                to: row,
            }),
            _ => row.copy_from_slice(from),
        }
        // None where there is no such expert.
        let slot_of = |slot: usize| {
            if slot >= top_k {
                return Some(Slot {
                    gate_up: shared_gate_up,
                    gate_up_stride: dims.shared_gate_up_stride as usize,
                    down: shared_down,
                    down_stride: dims.shared_down_stride as usize,
                    weight: gate.map_or(1.0, |gate| sigmoid(gate[token * dims.gate_stride as usize])),
                });
            }
            let pair = token * top_k + slot;
            let expert = ids[pair] as usize;
            (expert < experts).then(|| Slot {
                gate_up: &gate_up[(expert * dims.gate_up_expert_stride as usize).min(gate_up.len())..],
                gate_up_stride: dims.gate_up_stride as usize,
                down: &down[(expert * dims.down_expert_stride as usize).min(down.len())..],
                down_stride: dims.down_stride as usize,
                weight: weights[pair],
            })
        };
        let row = &*row;
        let activated = SharedSlice::new(&mut *between);
        for_rows(slots * inner, 2 * slots * inner * hidden, |index| {
            let (slot, element) = (index / inner, index % inner);
            let Some(Slot { gate_up, gate_up_stride, .. }) = slot_of(slot) else { return };
            let of =
                |row_of: usize| by_best(Dot { a: row, b: &gate_up[row_of * gate_up_stride..][..hidden] });
            let (gate, up) = (of(element), of(inner + element));
            // SAFETY: an element of its own.
            let activated = unsafe { activated.part(index, 1) };
            activated[0] = T::from_f32(by_best(Activated { activation, gate }) * up);
        });
        let between = &*between;
        let to = SharedSlice::new(&mut out[token * dims.out_stride as usize..][..hidden]);
        for_rows(hidden, slots * inner * hidden, |col| {
            let mut sum = 0.0;
            for (slot, a) in (0..slots).map(|slot| (slot, &between[slot * inner..][..inner])) {
                if let Some(Slot { down, down_stride, weight, .. }) = slot_of(slot) {
                    sum += weight * by_best(Dot { a, b: &down[col * down_stride..][..inner] });
                }
            }
            // SAFETY: an element of its own.
            let to = unsafe { to.part(col, 1) };
            let added = if store == Store::Add { to[0].to_f32() } else { 0.0 };
            to[0] = T::from_f32(sum + added);
        });
    }
    ROWS.replace(own);
}

/// The sum of products.
struct Dot<'s, T> {
    a: &'s [T],
    b: &'s [T],
}

impl<T: FloatElement> Work for Dot<'_, T> {
    type Out = f32;

    #[inline(always)]
    fn with<V: Lanes>(self) -> f32 {
        // Four sums, so that additions do not wait for each other.
        let mut sums = [V::splat(0.0); 4];
        for (i, (a, b)) in std::iter::zip(self.a.chunks(LANES), self.b.chunks(LANES)).enumerate() {
            sums[i % 4] = load_rest::<V, T>(a).mul_add(load_rest(b), sums[i % 4]);
        }
        sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum()
    }
}

/// The activation of a number.
struct Activated {
    activation: abi::ops::glu::Activation,
    gate: f32,
}

impl Work for Activated {
    type Out = f32;

    #[inline(always)]
    fn with<V: Lanes>(self) -> f32 {
        let mut lanes = [0.0; LANES];
        activate(self.activation, V::splat(self.gate)).store(&mut lanes);
        lanes[0]
    }
}
