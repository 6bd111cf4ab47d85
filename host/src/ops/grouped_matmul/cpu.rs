//! The grouped product on the CPU: expert after expert, each as a matrix product, parallel over its columns.

use abi::DType;
use abi::ops::glu::Activation;
use abi::ops::grouped_matmul::GroupedMatmulDims;
use abi::ops::matmul::MatmulDims;
use half::{bf16, f16};

use super::{GroupedMatmulArgs, GroupedMatmulProblem};
use crate::ops::matmul::MatmulB;
use crate::ops::matmul::cpu::{Strided, gated, packed_sums, sums};
use crate::ops::parallel::SharedSlice;
use crate::tensor::FloatElement;
use crate::weight::cpu::Packed;

/// The products; `few`: rows are done a few at a time, so that each has the same bits among any number.
pub(super) fn run(
    problem: &GroupedMatmulProblem,
    (dims, few): (&GroupedMatmulDims, bool),
    args: &mut GroupedMatmulArgs<'_>,
) {
    match problem.dtype {
        DType::F16 => experts::<f16>(dims, few, problem.gate, args),
        DType::BF16 => experts::<bf16>(dims, few, problem.gate, args),
        _ => experts::<f32>(dims, few, problem.gate, args),
    }
}

fn experts<T: FloatElement>(
    dims: &GroupedMatmulDims,
    few: bool,
    gate: Option<Activation>,
    args: &mut GroupedMatmulArgs<'_>,
) {
    let x = args.x.host_slice::<T>();
    let (w, packed) = match &args.w {
        MatmulB::Matrix(w) => (w.host_slice::<T>(), None),
        MatmulB::Packed(weight) => (&[][..], Some(Packed::new(weight))),
        // Refused.
        MatmulB::Int8 { .. } => return,
    };
    let offsets = args.offsets.host_slice::<u32>();
    let order = args.order.as_ref().map(|order| order.host_slice::<u32>());
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    let k = dims.k as usize;
    for (expert, bounds) in offsets.windows(2).enumerate() {
        // Bounded as on a card: wrong numbers give wrong rows.
        let [start, end] = [bounds[0].min(dims.rows), bounds[1].min(dims.rows)];
        if start >= end || dims.n == 0 {
            continue;
        }
        let own = MatmulDims {
            m: end - start,
            n: dims.n,
            k: dims.k,
            a_stride: dims.x_stride,
            b_stride: dims.w_stride,
            out_stride: dims.out_stride,
            a_batch_stride: 0,
            b_batch_stride: 0,
            out_batch_stride: 0,
            access: 0,
            split_log2: 0,
        };
        let row_of = |row: usize| {
            let sorted = start as usize + row;
            let from = order.map_or(sorted, |order| (order[sorted] / dims.fan_out.max(1)) as usize);
            let from = from.min(dims.x_rows as usize - 1);
            // No elements have no place.
            if k == 0 { &[] } else { &x[from * dims.x_stride as usize..][..k] }
        };
        let w = w.get(expert * dims.w_expert_stride as usize..).unwrap_or_default();
        let own_w = Strided { values: w, stride: dims.w_stride as usize, len: k };
        let store = |row: usize, col: usize, sums: &[f32]| {
            let (col, len) = if gate.is_some() { (col / 2, sums.len() / 2) } else { (col, sums.len()) };
            let to = (start as usize + row) * dims.out_stride as usize + col;
            // SAFETY: rows do not overlap (GroupedMatmul::run), and each stretch of a row is stored once.
            let out = unsafe { out.part(to, len) };
            if let Some(activation) = gate {
                return gated(sums, activation, out);
            }
            for (out, &sum) in std::iter::zip(out, sums) {
                *out = T::from_f32(sum);
            }
        };
        match &packed {
            Some(packed) => packed_sums(row_of, (packed, expert), (&own, few), store),
            // The rows of the gate and of up in turn, so that a stretch of sums has both.
            None if gate.is_some() => {
                let up = dims.n as usize / 2;
                sums(row_of, |row| own_w.row(row / 2 + row % 2 * up), (&own, few), store);
            }
            None => sums(row_of, |row| own_w.row(row), (&own, few), store),
        }
    }
}
