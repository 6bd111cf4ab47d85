//! What the matrix product refuses, and how it says so.

use std::sync::Arc;

use abi::ops::matmul::VARIANTS;
use testkit::simulator::Card;
use warpforge::ops::glu::Activation;
use warpforge::ops::matmul::{Act, Bias, Epilogue, Matmul, MatmulArgs, MatmulProblem, Residual, RowNorm};
use warpforge::ops::rmsnorm::NormWeight;
use warpforge::{Arch, Constant, DType, Device, Error, Tensor, TensorView, TensorViewMut};

use super::case::plain;
use crate::harness::devices;

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    let dtype = DType::BF16;
    for device in &devices() {
        let stream = device.stream()?;
        let problem = plain([4, 6, 8], dtype);
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |bias, a: &Tensor, b: &Tensor, added: Option<&Tensor>, out: &mut Tensor| {
            let plan = Matmul::plan(device, MatmulProblem { bias, ..problem })?;
            let bias = added.map(Tensor::view);
            let args = MatmulArgs { bias, ..MatmulArgs::new(a.view(), b.view(), out.view_mut()) };
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let (a, b) = (tensor(&[4, 8], dtype)?, tensor(&[6, 8], dtype)?);
        let (added, mut out) = (tensor(&[6], dtype)?, tensor(&[4, 6], dtype)?);
        let none = Bias::None;
        assert_eq!(
            message(none, &tensor(&[4, 7], dtype)?, &b, None, &mut out)?,
            "matmul: a: expected shape [any, 8], got [4, 7]"
        );
        assert_eq!(
            message(none, &tensor(&[5, 8], dtype)?, &b, None, &mut tensor(&[5, 6], dtype)?)?,
            "matmul: a: expected at most 4 rows, as planned, got 5"
        );
        assert_eq!(
            message(none, &a, &tensor(&[8, 6], dtype)?, None, &mut out)?,
            "matmul: b: expected shape [6, 8], got [8, 6]"
        );
        assert_eq!(
            message(none, &a, &tensor(&[6, 8], DType::F16)?, None, &mut out)?,
            "matmul: b: expected bf16, got f16"
        );
        assert_eq!(
            message(none, &a, &b, None, &mut tensor(&[4, 6], DType::F32)?)?,
            "matmul: out: expected bf16, got f32"
        );
        assert_eq!(
            message(none, &a, &b, Some(&added), &mut out)?,
            "matmul: bias: expected none, as planned, got a tensor"
        );
        assert_eq!(
            message(Bias::PerColumn, &a, &b, None, &mut out)?,
            "matmul: bias: expected a tensor, as planned, got none"
        );
        assert_eq!(
            message(Bias::PerColumn, &a, &b, Some(&tensor(&[7], dtype)?), &mut out)?,
            "matmul: bias: expected shape [6], got [7]"
        );
        let plan = Matmul::plan(device, problem)?;
        let transposed = tensor(&[8, 4], dtype)?;
        // SAFETY: 4 × 8 elements of the tensor, which lives longer.
        let columns =
            unsafe { TensorView::from_raw(device, transposed.view().address(), &[4, 8], &[1, 4], dtype)? };
        let args = MatmulArgs::new(columns, b.view(), out.view_mut());
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "matmul: a: expected stride 1 in the last dimension, got 4"
        );
        // SAFETY: inside the tensor, which lives longer and is not used otherwise.
        let overlapping =
            unsafe { TensorViewMut::from_raw(device, out.view().address(), &[4, 6], &[3, 1], dtype)? };
        let args = MatmulArgs::new(a.view(), b.view(), overlapping);
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "matmul: out: expected rows that do not overlap: a stride of at least 6, got 3"
        );
        let (a, b) = (tensor(&[2, 4, 8], dtype)?, tensor(&[2, 6, 8], dtype)?);
        let message = |batch, b: TensorView<'_>, out: TensorViewMut<'_>| {
            let plan = Matmul::plan(device, MatmulProblem { batch, ..problem })?;
            let args = MatmulArgs::new(a.view(), b, out);
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let mut out = tensor(&[2, 4, 6], dtype)?;
        assert_eq!(
            message(1, b.view(), out.view_mut())?,
            "matmul: a: expected at most 1 products, as planned, got 2"
        );
        assert_eq!(
            message(2, b.view().slice(0, 0..1)?, out.view_mut())?,
            "matmul: b: expected shape [2, 6, 8], got [1, 6, 8]"
        );
        assert_eq!(
            message(2, b.view(), out.view_mut().reshape(&[8, 6])?)?,
            "matmul: out: expected shape [2, 4, 6], got [8, 6]"
        );
        for (strides, least) in [([23, 6, 1], 24), ([6, 11, 1], 12)] {
            // SAFETY: inside the tensor, which lives longer and is not used otherwise.
            let overlapping = unsafe {
                TensorViewMut::from_raw(device, out.view().address(), &[2, 4, 6], &strides, dtype)?
            };
            let got = strides[0].max(strides[1]);
            assert_eq!(
                message(2, b.view(), overlapping)?,
                format!(
                    "matmul: out: expected rows that do not overlap: a stride of at least {least}, got {got}"
                )
            );
        }
        let unsupported =
            |problem: MatmulProblem| Matmul::supports(device, &problem).unwrap_err().to_string();
        assert_eq!(
            unsupported(MatmulProblem { dtype: DType::I8, ..problem }),
            "matmul: problem: expected dtype f32, f16 or bf16, got i8"
        );
        assert_eq!(
            unsupported(MatmulProblem { out_dtype: DType::F16, ..problem }),
            "matmul: problem: expected out_dtype bf16 or f32, got f16"
        );
        assert_eq!(
            unsupported(MatmulProblem { k: 1 << 31, ..problem }),
            "matmul: problem: expected k below 2^31, got 2147483648"
        );
        for batch in [0, 1 << 16] {
            assert_eq!(
                unsupported(MatmulProblem { batch, ..problem }),
                format!("matmul: problem: expected batch from 1 to 65535, got {batch}")
            );
        }
        let epilogue = |act| Epilogue::of(act);
        assert_eq!(
            unsupported(MatmulProblem { epilogue: epilogue(Act::Gated(Activation::Sigmoid)), ..problem }),
            "matmul: problem: expected activation silu, gelu_tanh or gelu_erf, got sigmoid"
        );
        assert_eq!(
            unsupported(MatmulProblem {
                epilogue: Epilogue { scale: f32::NAN, ..Epilogue::NONE },
                ..problem
            }),
            "matmul: problem: expected a finite scale, got NaN"
        );
        let (a, mut out) = (tensor(&[4, 8], dtype)?, tensor(&[4, 6], dtype)?);
        let mut fused = |epilogue, b: TensorView<'_>, up, bias: Option<TensorView<'_>>, residual| {
            let planned = if bias.is_some() { Bias::PerColumn } else { Bias::None };
            let plan = Matmul::plan(device, MatmulProblem { epilogue, bias: planned, ..problem })?;
            let args =
                MatmulArgs { a: a.view(), b: b.into(), up, gain: None, bias, residual, out: out.view_mut() };
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let gated = epilogue(Act::Gated(Activation::Silu));
        let added = Epilogue { residual: true, ..Epilogue::NONE };
        let (b, both, added_bias) =
            (tensor(&[6, 8], dtype)?, tensor(&[12, 16], dtype)?, tensor(&[6], dtype)?);
        let wide = both.view().slice(0, 0..6)?.slice(1, 0..8)?;
        let residual = tensor(&[4, 7], dtype)?;
        for (got, expected) in [
            (fused(gated, b.view(), None, None, None)?, "b: expected shape [12, 8], got [6, 8]"),
            (
                fused(gated, b.view(), Some(wide), None, None)?,
                "up: expected strides as of b: [8, 1], got [16, 1]",
            ),
            (
                fused(gated, both.view().slice(1, 0..8)?, None, Some(added_bias.view()), None)?,
                "bias: expected shape [12], got [6]",
            ),
            (
                fused(Epilogue::NONE, b.view(), Some(b.view()), None, None)?,
                "up: expected none, as planned, got a tensor",
            ),
            (fused(added, b.view(), None, None, None)?, "residual: expected a tensor, as planned, got none"),
            (
                fused(Epilogue::NONE, b.view(), None, None, Some(Residual::InPlace))?,
                "residual: expected none, as planned, got a tensor",
            ),
            (
                fused(added, b.view(), None, None, Some(Residual::Tensor(residual.view())))?,
                "residual: expected shape [4, 6], got [4, 7]",
            ),
        ] {
            assert_eq!(got, format!("matmul: {expected}"));
        }
        if device.limits().is_some() {
            let other =
                VARIANTS.iter().find(|variant| variant.dtype == DType::F32).expect("a kernel for f32");
            let message = Matmul::plan_with(device, problem, other).unwrap_err().to_string();
            assert!(
                message.starts_with("matmul: variant: expected f32 to f32 on sm_61, got bf16 to bf16 on "),
                "{message}"
            );
        }
    }
    Ok(())
}

/// A norm of a single row is of the kernel that reads weights ahead: what is no constant is refused by its name.
#[test]
fn normed_row_by_variables() -> Result<(), Error> {
    let (dtype, [n, k]) = (DType::BF16, [16, 64]);
    let device = Device::simulated(Arc::new(Card::new(Arch::Sm90a)))?;
    let stream = device.stream()?;
    let variable = |shape: &[usize]| Tensor::zeros(&stream, shape, dtype);
    let constant = |shape: &[usize]| Constant::new(variable(shape)?, &stream);
    let norm = Some(RowNorm { eps: 1e-6, weight: NormWeight::Plain });
    let (a, b, gain) = (variable(&[1, k])?, variable(&[n, k])?, variable(&[k])?);
    let [constant_b, constant_gain] = [constant(&[n, k])?, constant(&[k])?];
    let run = |act, b: TensorView<'_>, up, gain| {
        let epilogue = Epilogue { act, ..Epilogue::NONE };
        let problem = MatmulProblem { norm, epilogue, ..MatmulProblem::new(1, n, k, dtype) };
        let mut out = variable(&[1, n])?;
        let args = MatmulArgs { up, gain: Some(gain), ..MatmulArgs::new(a.view(), b, out.view_mut()) };
        Matmul::plan(&device, problem)?.run(&stream, args)
    };
    let gated = Act::Gated(Activation::Silu);
    let message = |result: Result<(), Error>| result.unwrap_err().to_string();
    assert_eq!(
        message(run(Act::None, b.view(), None, constant_gain.view())),
        "matmul: b: expected a constant, beside a norm of a single row, got another"
    );
    assert_eq!(
        message(run(gated, constant_b.view(), Some(b.view()), constant_gain.view())),
        "matmul: up: expected a constant, beside a norm of a single row, got another"
    );
    let expected = "matmul: gain: expected one at a multiple of 16 bytes, and of a single row a constant";
    let of_gain = message(run(Act::None, constant_b.view(), None, gain.view()));
    assert!(of_gain.starts_with(expected), "{of_gain}");
    run(Act::None, constant_b.view(), None, constant_gain.view())?;
    run(gated, constant_b.view(), Some(constant_b.view()), constant_gain.view())
}
