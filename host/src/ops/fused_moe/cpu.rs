//! The experts on the CPU, token by token: the elements of its experts in parallel, then the columns of out.

use std::cell::RefCell;

use abi::DType;
use abi::exact::sigmoid;
use abi::ops::fused_moe::FusedMoeDims;
use abi::weight::TILE_ROWS;
use half::{bf16, f16};

use super::{FusedMoeArgs, FusedMoeProblem};
use crate::ops::Store;
use crate::ops::glu::cpu::activate;
use crate::ops::matmul::MatmulB;
use crate::ops::moe_router;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::ops::rmsnorm::cpu::NormedRow;
use crate::simd::{LANES, Lanes, Work, by_best, load_rest};
use crate::tensor::FloatElement;
use crate::weight::cpu::Packed;

thread_local! {
    /// A row of x, and the rows between the products, in their own type.
    static ROWS: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    /// Rows in the order of packed codes.
    static ORDERED: RefCell<Vec<[f32; LANES]>> = const { RefCell::new(Vec::new()) };
    /// Numbers and weights of the experts that are chosen here.
    static CHOSEN: RefCell<(Vec<u32>, Vec<f32>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

/// Rows of a weight that are worked on together: those of a tile.
const BLOCK: usize = TILE_ROWS as usize;

pub(super) fn run(problem: &FusedMoeProblem, dims: &FusedMoeDims, args: &mut FusedMoeArgs<'_>) {
    match problem.dtype {
        DType::F16 => of_type::<f16>(problem, dims, args),
        DType::BF16 => of_type::<bf16>(problem, dims, args),
        _ => of_type::<f32>(problem, dims, args),
    }
}

/// The weights of all experts, or that of the shared one.
enum Weights<'a, T> {
    /// Elements, from one expert to the next, and from one row to the next.
    Plain(&'a [T], [usize; 2]),
    Packed(Packed<'a>),
}

impl<'a, T: FloatElement> Weights<'a, T> {
    fn of(given: &'a MatmulB<'_>, strides: [u32; 2]) -> Self {
        match given {
            MatmulB::Matrix(matrix) => {
                Weights::Plain(matrix.host_slice::<T>(), strides.map(|stride| stride as usize))
            }
            MatmulB::Packed(weight) => Weights::Packed(Packed::new(weight)),
            // No plan takes them.
            MatmulB::Int8 { .. } => Weights::Plain(&[], [0; 2]),
        }
    }

    /// That of the shared expert; none of what there is not.
    fn of_shared(given: &'a Option<MatmulB<'_>>, stride: u32) -> Self {
        given.as_ref().map_or(Weights::Plain(&[], [0; 2]), |given| Self::of(given, [0, stride]))
    }

    /// Vectors of a row as `order` leaves it.
    fn ordered_len(&self) -> usize {
        match self {
            Weights::Plain(..) => 0,
            Weights::Packed(packed) => packed.ordered_len() / LANES,
        }
    }

    /// Brings a row to the order of the codes, which `products` wants.
    fn order(&self, row: &[T], ordered: &mut [[f32; LANES]]) {
        if let Weights::Packed(packed) = self {
            packed.order(row, ordered);
        }
    }

    /// The products of a row and `sums.len()` rows of an expert's weight from `first` on, a multiple of [`BLOCK`] if it
    /// is packed.
    fn products(
        &self,
        (expert, first): (usize, usize),
        (row, ordered): (&[T], &[[f32; LANES]]),
        sums: &mut [f32],
    ) {
        match self {
            Weights::Plain(elements, [expert_stride, stride]) => {
                for (index, sum) in (first..).zip(sums) {
                    let from = expert * expert_stride + index * stride;
                    *sum = by_best(Dot { a: row, b: &elements[from.min(elements.len())..][..row.len()] });
                }
            }
            Weights::Packed(packed) => {
                let mut block = [[0.0; BLOCK]];
                packed.few_rows(expert, first / BLOCK, ordered, &mut block);
                sums.copy_from_slice(&block[0][..sums.len()]);
            }
        }
    }

    /// Whether the rows of a gate and of up are in turn: of the shared expert.
    fn is_in_turn(&self) -> bool {
        matches!(self, Weights::Packed(_))
    }
}

fn of_type<T: FloatElement>(problem: &FusedMoeProblem, dims: &FusedMoeDims, args: &mut FusedMoeArgs<'_>) {
    let FusedMoeProblem { top_k, experts, hidden, inner, activation, norm, store, .. } = *problem;
    let (tokens, slots) = (args.out.shape()[0], dims.slots as usize);
    if tokens * hidden == 0 {
        return;
    }
    let (mut own_ids, mut own_weights) = CHOSEN.take();
    let (ids, weights) = match (&args.logits, &args.ids, &args.weights) {
        (Some(logits), ..) => {
            let pairs = tokens * top_k;
            own_ids.resize(own_ids.len().max(pairs), 0);
            own_weights.resize(own_weights.len().max(pairs), 0.0);
            let bias = args.bias.as_ref().map(|bias| bias.host_slice::<f32>());
            let logits = logits.host_slice::<f32>();
            let (ids, weights) = (&mut own_ids[..pairs], &mut own_weights[..pairs]);
            moe_router::cpu::tokens(&dims.router, (logits, bias), ids, weights);
            (&*ids, &*weights)
        }
        (None, Some(ids), Some(weights)) => (ids.host_slice::<u32>(), weights.host_slice::<f32>()),
        // No plan takes it.
        _ => (&[][..], &[][..]),
    };
    let gate_up = Weights::<T>::of(&args.gate_up, [dims.gate_up_expert_stride, dims.gate_up_stride]);
    let down = Weights::<T>::of(&args.down, [dims.down_expert_stride, dims.down_stride]);
    let shared_gate_up = Weights::<T>::of_shared(&args.shared_gate_up, dims.shared_gate_up_stride);
    let shared_down = Weights::<T>::of_shared(&args.shared_down, dims.shared_down_stride);
    let gate = args.gate.as_ref().map(|gate| gate.host_slice::<f32>());
    let x = args.x.as_ref().map(|x| x.host_slice::<T>());
    let gain = args.gain.as_ref().map(|gain| gain.host_slice::<T>());
    let out = args.out.host_slice_mut::<T>();
    // A thread that waits may do other work, which finds no rows and makes its own.
    let (mut own, mut own_ordered) = (ROWS.take(), ORDERED.take());
    let elements = hidden + slots * inner;
    own.resize(own.len().max(elements), 0.0);
    let rows = &mut bytemuck::cast_slice_mut::<f32, T>(&mut own)[..elements];
    let (row, between) = rows.split_at_mut(hidden);
    // The row for the experts and for the shared one; then a row of each slot.
    let (of_up, of_shared) = (gate_up.ordered_len(), shared_gate_up.ordered_len());
    let of_down = down.ordered_len().max(shared_down.ordered_len());
    let vectors = (of_up + of_shared).max(slots * of_down);
    own_ordered.resize(own_ordered.len().max(vectors), [0.0; LANES]);
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
        // Number and weight; none where there is no such expert.
        let slot_of = |slot: usize| {
            if slot >= top_k {
                return Some((0, gate.map_or(1.0, |gate| sigmoid(gate[token * dims.gate_stride as usize]))));
            }
            let pair = token * top_k + slot;
            let expert = ids[pair] as usize;
            (expert < experts).then(|| (expert, weights[pair]))
        };
        let (ordered, ordered_shared) = own_ordered.split_at_mut(of_up);
        gate_up.order(row, ordered);
        shared_gate_up.order(row, &mut ordered_shared[..of_shared]);
        let (row, ordered, ordered_shared) = (&*row, &*ordered, &ordered_shared[..of_shared]);
        let activated = SharedSlice::new(&mut *between);
        let blocks = inner.div_ceil(BLOCK);
        for_rows(slots * blocks, 2 * slots * inner * hidden, |index| {
            let (slot, first) = (index / blocks, index % blocks * BLOCK);
            let Some((expert, _)) = slot_of(slot) else { return };
            let count = BLOCK.min(inner - first);
            let mut sums = [0.0; 2 * BLOCK];
            if slot < top_k {
                for (sums, first) in std::iter::zip(sums.chunks_mut(BLOCK), [first, inner + first]) {
                    gate_up.products((expert, first), (row, ordered), &mut sums[..count]);
                }
            } else {
                let in_turn = shared_gate_up.is_in_turn();
                let from = if in_turn { [2 * first, 2 * first + BLOCK] } else { [first, inner + first] };
                for (sums, first) in std::iter::zip(sums.chunks_mut(BLOCK), from) {
                    shared_gate_up.products((0, first), (row, ordered_shared), &mut sums[..count]);
                }
                if in_turn {
                    let turns = sums;
                    for i in 0..BLOCK {
                        (sums[i], sums[BLOCK + i]) = (turns[2 * i], turns[2 * i + 1]);
                    }
                }
            }
            // SAFETY: elements of its own.
            let activated = unsafe { activated.part(slot * inner + first, count) };
            for (i, to) in activated.iter_mut().enumerate() {
                let (gate, up) = (sums[i], sums[BLOCK + i]);
                *to = T::from_f32(by_best(Activated { activation, gate }) * up);
            }
        });
        let between = &*between;
        let of_slot = |slot: usize| if slot < top_k { &down } else { &shared_down };
        for slot in (0..slots).filter(|&slot| slot_of(slot).is_some()) {
            let weights = of_slot(slot);
            let to = &mut own_ordered[slot * of_down..][..weights.ordered_len()];
            weights.order(&between[slot * inner..][..inner], to);
        }
        let ordered = &*own_ordered;
        let to = SharedSlice::new(&mut out[token * dims.out_stride as usize..][..hidden]);
        for_rows(hidden.div_ceil(BLOCK), slots * inner * hidden, |block| {
            let first = block * BLOCK;
            let count = BLOCK.min(hidden - first);
            let mut total = [0.0; BLOCK];
            for slot in 0..slots {
                let Some((expert, weight)) = slot_of(slot) else { continue };
                let weights = of_slot(slot);
                let mut sums = [0.0; BLOCK];
                let ordered = &ordered[slot * of_down..][..weights.ordered_len()];
                let a = (&between[slot * inner..][..inner], ordered);
                weights.products((expert, first), a, &mut sums[..count]);
                for (total, sum) in std::iter::zip(&mut total, sums) {
                    *total += weight * sum;
                }
            }
            // SAFETY: elements of its own.
            let to = unsafe { to.part(first, count) };
            for (to, total) in std::iter::zip(to, total) {
                let added = if store == Store::Add { to.to_f32() } else { 0.0 };
                *to = T::from_f32(total + added);
            }
        });
    }
    ROWS.replace(own);
    ORDERED.replace(own_ordered);
    CHOSEN.replace((own_ids, own_weights));
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
