//! Gated linear unit activation on the CPU: rows in parallel.

use abi::DType;
use abi::ops::glu::Activation;
use half::{bf16, f16};

use super::GluArgs;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

pub(super) fn run(dtype: DType, activation: Activation, args: &mut GluArgs<'_>) {
    match dtype {
        DType::F16 => of_type::<f16>(activation, args),
        DType::BF16 => of_type::<bf16>(activation, args),
        _ => of_type::<f32>(activation, args),
    }
}

fn of_type<T: FloatElement>(activation: Activation, args: &mut GluArgs<'_>) {
    match activation {
        Activation::Silu => rows::<T>(args, silu),
        Activation::GeluTanh => rows::<T>(args, gelu_tanh),
        Activation::GeluErf => rows::<T>(args, gelu_erf),
        Activation::Sigmoid => rows::<T>(args, sigmoid),
    }
}

/// The function of an activation.
pub(crate) fn act(activation: Activation) -> fn(f32) -> f32 {
    match activation {
        Activation::Silu => silu,
        Activation::GeluTanh => gelu_tanh,
        Activation::GeluErf => gelu_erf,
        Activation::Sigmoid => sigmoid,
    }
}

fn rows<T: FloatElement>(args: &mut GluArgs<'_>, act: impl Fn(f32) -> f32 + Sync + Send) {
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
        match up {
            Some((up, stride)) => {
                for ((out, gate), up) in out.iter_mut().zip(gate).zip(&up[row * stride..][..cols]) {
                    *out = T::from_f32(act(gate.to_f32()) * up.to_f32());
                }
            }
            None => {
                for (out, gate) in out.iter_mut().zip(gate) {
                    *out = T::from_f32(act(gate.to_f32()));
                }
            }
        }
    });
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

/// (1 + tanh(z/2)) / 2 is sigmoid(z).
fn gelu_tanh(x: f32) -> f32 {
    const LINEAR: f32 = 1.595_769; // 2 √(2/π)
    times_sigmoid(x, LINEAR * (x + 0.044_715 * x * x * x))
}

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
