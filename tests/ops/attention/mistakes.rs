//! What attention refuses, and how it says so.

use warpforge::ops::attention::{
    Attention, AttentionArgs, AttentionProblem, KvScales, Offsets, ScoreBias, ScoreTensors, Scores,
};
use warpforge::{DType, Error, Tensor};

use super::case::*;
use crate::harness::devices;

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = plain(DType::F32, 4, 8, (4, 2), 64).problem();
        let plan = Attention::plan(device, problem)?;
        let tensor = |shape: &[usize], dtype| Tensor::zeros(&stream, shape, dtype);
        let message = |q: &Tensor, k: &Tensor, v: &Tensor, kv_lens: Option<&Tensor>, out: &mut Tensor| {
            let (q, k, v, kv_lens) = (q.view(), k.view(), v.view(), kv_lens.map(Tensor::view));
            let args = AttentionArgs {
                q,
                k,
                v,
                kv_lens,
                kv_scales: KvScales::default(),
                out: out.view_mut(),
                lse: None,
                scores: ScoreTensors::default(),
                offsets: Offsets::default(),
                page_table: None,
            };
            plan.run(&stream, args).unwrap_err().to_string()
        };
        let (q, kv) = (tensor(&[1, 4, 4, 64], DType::F32)?, tensor(&[1, 8, 2, 64], DType::F32)?);
        let mut out = tensor(&[1, 4, 4, 64], DType::F32)?;
        assert_eq!(
            message(&tensor(&[1, 4, 3, 64], DType::F32)?, &kv, &kv, None, &mut out),
            "attention: q: expected shape [any, any, 4, 64], got [1, 4, 3, 64]"
        );
        assert_eq!(
            message(&q, &tensor(&[1, 8, 2, 64], DType::BF16)?, &kv, None, &mut out),
            "attention: k: expected f32, got bf16"
        );
        assert_eq!(
            message(&q, &kv, &tensor(&[1, 7, 2, 64], DType::F32)?, None, &mut out),
            "attention: v: expected shape [1, 8, 2, 64], got [1, 7, 2, 64]"
        );
        assert_eq!(
            message(&q, &kv, &kv, Some(&tensor(&[2], DType::U32)?), &mut out),
            "attention: kv_lens: expected shape [1], got [2]"
        );
        assert_eq!(
            message(&q, &kv, &kv, Some(&tensor(&[1], DType::I32)?), &mut out),
            "attention: kv_lens: expected u32, got i32"
        );
        assert_eq!(
            message(&q, &kv, &kv, None, &mut tensor(&[1, 4, 4, 32], DType::F32)?),
            "attention: out: expected shape [1, 4, 4, 64], got [1, 4, 4, 32]"
        );
        let sinks = tensor(&[3], DType::F32)?;
        let args = AttentionArgs {
            q: q.view(),
            k: kv.view(),
            v: kv.view(),
            kv_lens: None,
            kv_scales: KvScales::default(),
            out: out.view_mut(),
            lse: None,
            scores: ScoreTensors { sinks: Some(sinks.view()), ..ScoreTensors::default() },
            offsets: Offsets::default(),
            page_table: None,
        };
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "attention: sinks: expected shape [4], got [3]"
        );
        let scores = Scores { bias: ScoreBias::Boolean, blocks: Some(16), ..Scores::PLAIN };
        let masked = Attention::plan(device, AttentionProblem { scores, ..problem })?;
        let (bias, floats) = (tensor(&[1, 4, 1, 8], DType::I8)?, tensor(&[1, 4, 1, 8], DType::F32)?);
        let wide = tensor(&[1, 3, 1, 1], DType::U32)?;
        let mut of_masks = |bias: Option<&Tensor>, blocks: Option<&Tensor>| {
            let (bias, blocks) = (bias.map(Tensor::view), blocks.map(Tensor::view));
            let scores = ScoreTensors { bias, blocks, ..ScoreTensors::default() };
            let (q, k, v) = (q.view(), kv.view(), kv.view());
            let args = AttentionArgs {
                q,
                k,
                v,
                kv_lens: None,
                kv_scales: KvScales::default(),
                out: out.view_mut(),
                lse: None,
                scores,
                offsets: Offsets::default(),
                page_table: None,
            };
            masked.run(&stream, args).unwrap_err().to_string()
        };
        assert_eq!(of_masks(None, None), "attention: bias: expected a tensor, as planned, got none");
        assert_eq!(of_masks(Some(&bias), None), "attention: blocks: expected a tensor, as planned, got none");
        assert_eq!(
            of_masks(Some(&floats), None),
            "attention: blocks: expected a tensor, as planned, got none"
        );
        assert_eq!(of_masks(Some(&floats), Some(&wide)), "attention: bias: expected i8, got f32");
        assert_eq!(
            of_masks(Some(&bias), Some(&wide)),
            "attention: blocks: expected shape [1, 4, 1, 1], got [1, 3, 1, 1]"
        );
        let mut of_offsets = |q_words: Option<&Tensor>, kv_words: Option<&Tensor>, lens: Option<&Tensor>| {
            let offsets = Offsets { q: q_words.map(Tensor::view), kv: kv_words.map(Tensor::view) };
            let kv_lens = lens.map(Tensor::view);
            let (q, k, v) = (q.view(), kv.view(), kv.view());
            let (out, scores, page_table) = (out.view_mut(), ScoreTensors::default(), None);
            let kv_scales = KvScales::default();
            let args =
                AttentionArgs { q, k, v, kv_lens, kv_scales, offsets, out, lse: None, scores, page_table };
            plan.run(&stream, args).unwrap_err().to_string()
        };
        let words = |count| tensor(&[count], DType::U32);
        let (none, one, two, three) = (words(0)?, words(1)?, words(2)?, words(3)?);
        assert_eq!(
            of_offsets(Some(&none), None, None),
            "attention: offsets.q: expected the sequences' first tokens and the end, got no number"
        );
        assert_eq!(
            of_offsets(Some(&kv), None, None),
            "attention: offsets.q: expected shape [any], got [1, 8, 2, 64]"
        );
        assert_eq!(
            of_offsets(Some(&three), Some(&three), None),
            "attention: q: expected at most 1 sequences, as planned, got 2"
        );
        assert_eq!(
            of_offsets(Some(&two), Some(&three), None),
            "attention: offsets.kv: expected shape [2], got [3]"
        );
        assert_eq!(
            of_offsets(Some(&two), Some(&two), Some(&one)),
            "attention: kv_lens: expected none, as keys are packed, got a tensor"
        );
        let narrow = AttentionProblem { head_dim_v: 32, ..problem };
        let args = AttentionArgs {
            q: q.view(),
            k: kv.view(),
            v: kv.view(),
            kv_lens: None,
            kv_scales: KvScales::default(),
            out: out.view_mut(),
            lse: None,
            scores: ScoreTensors::default(),
            offsets: Offsets::default(),
            page_table: None,
        };
        assert_eq!(
            Attention::plan(device, narrow)?.run(&stream, args).unwrap_err().to_string(),
            "attention: v: expected shape [1, 8, 2, 32], got [1, 8, 2, 64]"
        );
        let long = tensor(&[1, 9, 2, 64], DType::F32)?;
        assert_eq!(
            message(&q, &long, &long, None, &mut out),
            "attention: k: expected at most 8 keys, as planned, got 9"
        );
        let mut lse = tensor(&[1, 4, 5], DType::F32)?;
        let args = AttentionArgs {
            q: q.view(),
            k: kv.view(),
            v: kv.view(),
            kv_lens: None,
            kv_scales: KvScales::default(),
            out: out.view_mut(),
            lse: Some(lse.view_mut()),
            scores: ScoreTensors::default(),
            offsets: Offsets::default(),
            page_table: None,
        };
        assert_eq!(
            plan.run(&stream, args).unwrap_err().to_string(),
            "attention: lse: expected shape [1, 4, 4], got [1, 4, 5]"
        );
        let lens = tensor(&[1], DType::U32)?;
        let message = |page_size, k: &Tensor, kv_lens: Option<&Tensor>, table: Option<&Tensor>| {
            let mut out = Tensor::zeros(&stream, &[1, 4, 4, 64], DType::F32)?;
            let (kv_lens, page_table) = (kv_lens.map(Tensor::view), table.map(Tensor::view));
            let (q, k, v, out) = (q.view(), k.view(), k.view(), out.view_mut());
            let scores = ScoreTensors::default();
            let args = AttentionArgs {
                q,
                k,
                v,
                kv_lens,
                kv_scales: KvScales::default(),
                out,
                lse: None,
                scores,
                offsets: Offsets::default(),
                page_table,
            };
            let plan = Attention::plan(device, AttentionProblem { page_size, ..problem })?;
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let (pool, table) = (tensor(&[3, 16, 2, 64], DType::F32)?, tensor(&[1, 1], DType::U32)?);
        let pages = Some(16);
        assert_eq!(
            message(None, &kv, Some(&lens), Some(&table))?,
            "attention: page_table: expected none, as planned without pages, got a table"
        );
        assert_eq!(
            message(pages, &pool, Some(&lens), None)?,
            "attention: page_table: expected a table, as planned, got none"
        );
        assert_eq!(
            message(pages, &pool, None, Some(&table))?,
            "attention: kv_lens: expected the sequences' lengths, as there are pages, got none"
        );
        assert_eq!(
            message(pages, &kv, Some(&lens), Some(&table))?,
            "attention: k: expected shape [any, 16, 2, 64], got [1, 8, 2, 64]"
        );
        assert_eq!(
            message(pages, &pool, Some(&lens), Some(&tensor(&[2, 1], DType::U32)?))?,
            "attention: page_table: expected shape [1, any], got [2, 1]"
        );
        assert_eq!(
            message(pages, &pool, Some(&lens), Some(&tensor(&[1, 2], DType::U32)?))?,
            "attention: page_table: expected at most 1 pages of a sequence, as planned, got 2"
        );
        let one = tensor(&[2], DType::F32)?;
        let message = |problem: AttentionProblem, kv: &Tensor, scale: &Tensor| {
            let mut out = Tensor::zeros(&stream, &[1, 4, 4, 64], problem.dtype)?;
            let q = Tensor::zeros(&stream, &[1, 4, 4, 64], problem.dtype)?;
            let (q, k, v, out, page_table) = (q.view(), kv.view(), kv.view(), out.view_mut(), None);
            let kv_scales = KvScales { k: None, v: Some(scale.view()) };
            let scores = ScoreTensors::default();
            let args = AttentionArgs {
                q,
                k,
                v,
                kv_lens: None,
                kv_scales,
                offsets: Offsets::default(),
                out,
                lse: None,
                scores,
                page_table,
            };
            Ok::<_, Error>(Attention::plan(device, problem)?.run(&stream, args).unwrap_err().to_string())
        };
        let fp8 = AttentionProblem { dtype: DType::BF16, dtype_kv: DType::F8E4M3, ..problem };
        assert_eq!(
            message(problem, &kv, &one)?,
            "attention: v_scale: expected none, as k and v are not fp8, got a tensor"
        );
        assert_eq!(message(fp8, &kv, &one)?, "attention: k: expected f8e4m3, got f32");
        let kv8 = tensor(&[1, 8, 2, 64], DType::F8E4M3)?;
        assert_eq!(
            message(fp8, &kv8, &tensor(&[3], DType::F32)?)?,
            "attention: v_scale: expected shape [2], got [3]"
        );
        let unsupported = [
            (
                AttentionProblem { heads_kv: 3, ..problem },
                "heads_q a multiple of heads_kv, both at least 1, got 4 and 3",
            ),
            (
                AttentionProblem { heads_kv: 0, ..problem },
                "heads_q a multiple of heads_kv, both at least 1, got 4 and 0",
            ),
            (AttentionProblem { heads_q: 1 << 16, ..problem }, "heads_q below 2^16, got 65536"),
            (AttentionProblem { head_dim: 68, ..problem }, "head_dim a multiple of 8 from 8 to 576, got 68"),
            (
                AttentionProblem { head_dim: 584, ..problem },
                "head_dim a multiple of 8 from 8 to 576, got 584",
            ),
            (
                AttentionProblem { head_dim_v: 520, ..problem },
                "head_dim_v a multiple of 8 from 8 to 512, got 520",
            ),
            (
                AttentionProblem { head_dim_v: 28, ..problem },
                "head_dim_v a multiple of 8 from 8 to 512, got 28",
            ),
            (AttentionProblem { dtype: DType::I8, ..problem }, "dtype f32, f16 or bf16, got i8"),
            (
                AttentionProblem { page_size: Some(48), ..problem },
                "pages of 16, 32, 64, 128 or 256 keys, got 48",
            ),
            (AttentionProblem { window: Some(0), ..problem }, "a window of at least 1 key, got 0"),
            (AttentionProblem { scale: Some(f32::NAN), ..problem }, "a finite scale, got NaN"),
            (
                AttentionProblem { scores: Scores { soft_cap: Some(0.0), ..Scores::PLAIN }, ..problem },
                "a soft cap from 1e-30 to 1e30, got 0",
            ),
            (
                AttentionProblem { scores: Scores { blocks: Some(48), ..Scores::PLAIN }, ..problem },
                "blocks of 16, 32, 64 or 128, got 48",
            ),
            (AttentionProblem { dtype_kv: DType::F8E4M3, ..problem }, "dtype_kv f32, got f8e4m3"),
            (AttentionProblem { dtype_kv: DType::F16, ..fp8 }, "dtype_kv bf16 or f8e4m3, got f16"),
            (
                AttentionProblem { head_dim_v: 40, ..fp8 },
                "head_dim_v a multiple of 16, as k and v are fp8, got 40",
            ),
            (AttentionProblem { seq_kv: 1 << 30, ..problem }, "seq_kv below 2^30, got 1073741824"),
        ];
        for (problem, message) in unsupported {
            let error = Attention::supports(device, &problem).unwrap_err().to_string();
            assert_eq!(error, format!("attention: problem: expected {message}"));
        }
    }
    Ok(())
}
