//! What sampling refuses, and how it says so.

use warpforge::ops::sampling::{
    PARAMS_LEN, Sampler, SamplingArgs, SamplingFeatures, SamplingParams, SamplingProblem,
};
use warpforge::{DType, Error, Tensor};

use super::case::*;
use crate::harness::devices;

/// Parameters out of their range, and those that a plan was not made for: the message names the field.
#[test]
fn bad_params() {
    let problem = |features| SamplingProblem { features, ..SamplingProblem::new(4, 64, DType::F32) };
    let refused = |features, params| {
        let error = problem(features).write_params(&[params], &mut [0; PARAMS_LEN]);
        error.unwrap_err().to_string()
    };
    for (temperature, got) in [
        (-0.5, "-0.5"),
        (f32::NAN, "NaN"),
        (f32::INFINITY, "inf"),
        (1e-40, "0.0000000000000000000000000000000000000001"),
    ] {
        let expected = format!("sampling: temperature: expected 0, or a normal number above 0, got {got}");
        assert_eq!(refused(ALL, SamplingParams { temperature, ..RANDOM }), expected);
    }
    for (p, got) in [(0.0, "0"), (1.5, "1.5"), (-1.0, "-1"), (f32::NAN, "NaN")] {
        let expected = |name| format!("sampling: {name}: expected a number above 0 and at most 1, got {got}");
        assert_eq!(refused(ALL, SamplingParams { top_p: p, ..RANDOM }), expected("top_p"));
        assert_eq!(refused(ALL, SamplingParams { typical_p: p, ..RANDOM }), expected("typical_p"));
    }
    let table = [
        (SamplingParams { min_p: -0.1, ..RANDOM }, "min_p: expected a number from 0 to 1, got -0.1"),
        (
            SamplingParams { repetition_penalty: 0.0, ..GREEDY },
            "repetition_penalty: expected a finite number above 0, got 0",
        ),
        (
            SamplingParams { presence_penalty: f32::NAN, ..GREEDY },
            "presence_penalty: expected a finite number, got NaN",
        ),
        (SamplingParams { history_len: 25, ..GREEDY }, "history_len: expected at most 24, got 25"),
        (SamplingParams { num_bias: 6, ..GREEDY }, "num_bias: expected at most 5, got 6"),
        (SamplingParams { history_len: 3, prompt_len: 4, ..GREEDY }, "prompt_len: expected at most 3, got 4"),
    ];
    for (params, expected) in table {
        assert_eq!(refused(ALL, params), format!("sampling: {expected}"));
    }
    let without =
        |name| format!("sampling: {name}: expected none, as the plan's features are without, got one");
    let bare = SamplingFeatures { draws: true, ..SamplingFeatures::GREEDY };
    for (name, params) in [
        ("top_k", SamplingParams { top_k: Some(3), ..RANDOM }),
        ("top_p", SamplingParams { top_p: 0.5, ..RANDOM }),
        ("typical_p", SamplingParams { typical_p: 0.5, ..RANDOM }),
        ("is_masked", SamplingParams { is_masked: true, ..GREEDY }),
        ("repetition_penalty", SamplingParams { repetition_penalty: 1.1, ..GREEDY }),
    ] {
        assert_eq!(refused(bare, params), without(name));
    }
    assert_eq!(refused(SamplingFeatures::GREEDY, RANDOM), without("temperature"));
    let error = problem(ALL).write_params(&[GREEDY; 2], &mut [0; PARAMS_LEN]).unwrap_err();
    assert_eq!(error.to_string(), "sampling: words: expected 16 words for each of 2 rows, got 16");
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = SamplingProblem::new(4, 64, DType::F32);
        let plan = Sampler::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |logits: &Tensor, ids: &mut Tensor| {
            plan.run(&stream, SamplingArgs::new(logits.view(), ids.view_mut())).unwrap_err().to_string()
        };
        let mut ids = tensor(&[4], DType::U32)?;
        assert_eq!(
            message(&tensor(&[4, 65], DType::F32)?, &mut ids),
            "sampling: logits: expected shape [any, 64], got [4, 65]"
        );
        assert_eq!(
            message(&tensor(&[4, 64], DType::F16)?, &mut ids),
            "sampling: logits: expected f32, got f16"
        );
        assert_eq!(
            message(&tensor(&[5, 64], DType::F32)?, &mut tensor(&[5], DType::U32)?),
            "sampling: logits: expected at most 4 rows, as planned, got 5"
        );
        assert_eq!(
            message(&tensor(&[4, 64], DType::F32)?, &mut tensor(&[3], DType::U32)?),
            "sampling: ids: expected shape [4], got [3]"
        );
        assert_eq!(
            message(&tensor(&[4, 64], DType::F32)?, &mut tensor(&[4], DType::I32)?),
            "sampling: ids: expected u32, got i32"
        );
        let logits = tensor(&[4, 64], DType::F32)?;
        let params = tensor(&[4, PARAMS_LEN], DType::U32)?;
        let args = SamplingArgs::new(logits.view(), ids.view_mut());
        assert_eq!(
            plan.run(&stream, SamplingArgs { params: Some(params.view()), ..args }).unwrap_err().to_string(),
            "sampling: params: expected none, as the features have no parameters, got a tensor"
        );
        let all = Sampler::plan(device, SamplingProblem { features: ALL, ..problem })?;
        assert_eq!(
            all.run(&stream, SamplingArgs::new(logits.view(), ids.view_mut())).unwrap_err().to_string(),
            "sampling: params: expected a tensor, as the features have parameters, got none"
        );
        let refused = |problem| Sampler::plan(device, problem).unwrap_err().to_string();
        assert_eq!(
            refused(SamplingProblem { vocab: 0, ..problem }),
            "sampling: problem: expected a vocabulary of 1 to 8388608, got 0"
        );
        assert_eq!(
            refused(SamplingProblem { vocab: (1 << 23) + 1, ..problem }),
            "sampling: problem: expected a vocabulary of 1 to 8388608, got 8388609"
        );
        assert_eq!(
            refused(SamplingProblem { dtype: DType::U32, ..problem }),
            "sampling: problem: expected dtype f32, f16 or bf16, got u32"
        );
        let features = SamplingFeatures { logprobs: Some(65), ..SamplingFeatures::GREEDY };
        assert_eq!(
            refused(SamplingProblem { features, ..problem }),
            "sampling: features: expected logprobs of at most 64, got 65"
        );
        let features = SamplingFeatures { top_k: true, ..SamplingFeatures::GREEDY };
        let error = refused(SamplingProblem { features, ..problem });
        assert!(
            error.starts_with("sampling: features: expected draws, as what is drawn from is bounded"),
            "{error}"
        );
    }
    Ok(())
}
