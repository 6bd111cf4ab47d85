//! RMSNorm on the CPU: rows in parallel. The squares are added up in four times sixteen lanes, in one order.

use abi::DType;
use abi::ops::glu::Activation;
use abi::ops::rmsnorm::RmsNormDims;
use abi::range;
use half::{bf16, f16};

use super::RmsNormArgs;
use crate::ops::glu::cpu::activate;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::simd::{LANES, Lanes, Work, by_best, load, load_rest, store_rest};
use crate::tensor::FloatElement;

pub(super) fn run(dtype: DType, dims: &RmsNormDims, args: &mut RmsNormArgs<'_>) {
    match dtype {
        DType::F16 => rows::<f16>(dims, args),
        DType::BF16 => rows::<bf16>(dims, args),
        _ => rows::<f32>(dims, args),
    }
}

fn rows<T: FloatElement>(dims: &RmsNormDims, args: &mut RmsNormArgs<'_>) {
    let (rows, cols, heads) = (dims.rows as usize, dims.cols as usize, dims.heads as usize);
    let (x, weight) = (args.x.host_slice::<T>(), args.weight.host_slice::<T>());
    let gate = args.gate.as_ref().map(|gate| gate.host_slice::<T>());
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    let residual = args.residual.as_mut().map(|residual| SharedSlice::new(residual.host_slice_mut::<T>()));
    let offset = |row: usize, token_stride: u32, head_stride: u32| {
        row / heads * token_stride as usize + row % heads * head_stride as usize
    };
    for_rows(rows, rows * cols, |row| {
        let x = &x[offset(row, dims.x_token_stride, dims.x_head_stride)..][..cols];
        // SAFETY: rows do not overlap within a view that is written (distinct rows have distinct elements).
        let to = unsafe { out.part(offset(row, dims.out_token_stride, dims.out_head_stride), cols) };
        let gate =
            gate.map(|gate| &gate[offset(row, dims.gate_token_stride, dims.gate_head_stride)..][..cols]);
        let from = match residual {
            None => x,
            Some(residual) => {
                let start = offset(row, dims.residual_token_stride, dims.residual_head_stride);
                // SAFETY: as for out.
                let sum = unsafe { residual.part(start, cols) };
                by_best(Added { row: x, to: sum });
                sum
            }
        };
        let (inv_cols, eps, weight_offset) = (dims.inv_cols, dims.eps, dims.weight_offset);
        by_best(NormedRow { from: Some(from), weight, weight_offset, inv_cols, eps, gate, to });
    });
}

/// A row that is added to another.
struct Added<'s, T> {
    row: &'s [T],
    to: &'s mut [T],
}

impl<T: FloatElement> Work for Added<'_, T> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        for (to, row) in std::iter::zip(self.to.chunks_mut(LANES), self.row.chunks(LANES)) {
            store_rest(load_rest::<V, T>(to).add(load_rest(row)), to);
        }
    }
}

/// A row times the inverse root of the mean of its squares, and times weights.
pub(crate) struct NormedRow<'s, T> {
    /// None for what is in `to`.
    pub(crate) from: Option<&'s [T]>,
    pub(crate) weight: &'s [T],
    /// What is added to weights.
    pub(crate) weight_offset: f32,
    pub(crate) inv_cols: f32,
    pub(crate) eps: f32,
    /// The SiLU of what multiplies the result.
    pub(crate) gate: Option<&'s [T]>,
    pub(crate) to: &'s mut [T],
}

impl<T: FloatElement> Work for NormedRow<'_, T> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let NormedRow { from, weight, weight_offset, inv_cols, eps, gate, to } = self;
        let row = from.unwrap_or(&*to);
        let first = sum_of_squares::<V, T>(row, 1.0) * inv_cols + range::epsilon(eps, 1.0);
        let factor = range::factor(first);
        let mean = if factor == 1.0 {
            first
        } else {
            sum_of_squares::<V, T>(row, factor) * inv_cols + range::epsilon(eps, factor)
        };
        let (factor, scale, offset) =
            (V::splat(factor), V::splat(1.0 / mean.sqrt()), V::splat(weight_offset));
        for (i, to) in to.chunks_mut(LANES).enumerate() {
            let part = i * LANES..i * LANES + to.len();
            let value: V = load_rest(from.map_or(&*to, |from| &from[part.clone()]));
            let weight = load_rest::<V, T>(&weight[part.clone()]).add(offset);
            let mut normed = value.mul(factor).mul(scale).mul(weight);
            if let Some(gate) = gate {
                normed = normed.mul(activate(Activation::Silu, load_rest(&gate[part])));
            }
            store_rest(normed, to);
        }
    }
}

/// The sum of the squares of a row that is multiplied by a factor first.
#[inline(always)]
fn sum_of_squares<V: Lanes, T: FloatElement>(row: &[T], factor: f32) -> f32 {
    let factor = V::splat(factor);
    let (whole, rest) = row.as_chunks::<LANES>();
    let (fours, others) = whole.as_chunks::<4>();
    // Four sums, so that additions do not wait for each other.
    let mut sums = [V::splat(0.0); 4];
    for four in fours {
        for i in 0..4 {
            let values = load::<V, T>(&four[i]).mul(factor);
            sums[i] = values.mul_add(values, sums[i]);
        }
    }
    for other in others {
        let values = load::<V, T>(other).mul(factor);
        sums[0] = values.mul_add(values, sums[0]);
    }
    let values = load_rest::<V, T>(rest).mul(factor);
    sums[1] = values.mul_add(values, sums[1]);
    sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum()
}
