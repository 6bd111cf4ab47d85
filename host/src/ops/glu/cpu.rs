//! Gated linear unit activation on the CPU: rows in parallel.

use abi::DType;
use abi::ops::glu::Activation;
use half::{bf16, f16};

use super::GluArgs;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::simd::{LANES, Lanes, Work, by_best, exp, load_rest, store_rest};
use crate::tensor::FloatElement;

pub(super) fn run(dtype: DType, activation: Activation, args: &mut GluArgs<'_>) {
    match dtype {
        DType::F16 => of_type::<f16>(activation, args),
        DType::BF16 => of_type::<bf16>(activation, args),
        _ => of_type::<f32>(activation, args),
    }
}

fn of_type<T: FloatElement>(activation: Activation, args: &mut GluArgs<'_>) {
    let [rows, cols] = *args.out.shape() else { return };
    let (gate_stride, out_stride) = (args.gate.strides()[0], args.out.strides()[0]);
    if args.out.is_empty() {
        return;
    }
    let gate = args.gate.host_slice::<T>();
    let up = args.up.as_ref().map(|up| (up.host_slice::<T>(), up.strides()[0]));
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    for_rows(rows, rows * cols, |row| {
        let gate = &gate[row * gate_stride..][..cols];
        // SAFETY: the rows of a view that is written do not overlap.
        let out = unsafe { out.part(row * out_stride, cols) };
        let up = up.map(|(up, stride)| &up[row * stride..][..cols]);
        by_best(Row { activation, gate, up, out });
    });
}

struct Row<'s, T> {
    activation: Activation,
    gate: &'s [T],
    up: Option<&'s [T]>,
    out: &'s mut [T],
}

impl<T: FloatElement> Work for Row<'_, T> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        for (i, out) in self.out.chunks_mut(LANES).enumerate() {
            let part = i * LANES..i * LANES + out.len();
            let mut value = activate(self.activation, load_rest::<V, T>(&self.gate[part.clone()]));
            if let Some(up) = self.up {
                value = value.mul(load_rest(&up[part]));
            }
            store_rest(value, out);
        }
    }
}

/// The function of an activation.
#[inline(always)]
pub(crate) fn activate<V: Lanes>(activation: Activation, x: V) -> V {
    match activation {
        Activation::Silu => times_sigmoid_of(x, x),
        Activation::GeluTanh => {
            let cube = x.mul(V::splat(0.044_715)).mul(x).mul(x);
            times_sigmoid_of(x, x.add(cube).mul(V::splat(LINEAR)))
        }
        Activation::GeluErf | Activation::Sigmoid => {
            let act = if activation == Activation::Sigmoid { sigmoid } else { gelu_erf };
            let mut lanes = [0.0; LANES];
            x.store(&mut lanes);
            for lane in &mut lanes {
                *lane = act(*lane);
            }
            V::load(&lanes)
        }
    }
}

/// As [`times_sigmoid`].
#[inline(always)]
fn times_sigmoid_of<V: Lanes>(x: V, z: V) -> V {
    let power = exp(z.neg_abs());
    // Of −inf · 0 that would be NaN.
    let finite = V::splat(f32::MIN).max(x);
    z.where_negative(finite.mul(power), x).div(power.add(V::splat(1.0)))
}

/// x · sigmoid(z), for z of the sign of x; −0 for −inf.
fn times_sigmoid(x: f32, z: f32) -> f32 {
    if x == f32::NEG_INFINITY {
        return -0.0;
    }
    let power = (-z.abs()).exp();
    (if z < 0.0 { x * power } else { x }) / (1.0 + power)
}

/// x · sigmoid(x).
pub(crate) fn silu(x: f32) -> f32 {
    times_sigmoid(x, x)
}

/// 2 √(2/π): (1 + tanh(z/2)) / 2 is sigmoid(z).
const LINEAR: f32 = 1.595_769;

fn gelu_erf(x: f32) -> f32 {
    if x == f32::NEG_INFINITY {
        return -0.0;
    }
    0.5 * x * libm::erfcf(-x * std::f32::consts::FRAC_1_SQRT_2)
}

/// 1 / (1 + e^−x).
pub(crate) fn sigmoid(x: f32) -> f32 {
    let power = (-x.abs()).exp();
    (if x < 0.0 { power } else { 1.0 }) / (1.0 + power)
}
