//! Keys in fp8 that are gathered for some sequences at a time, where memory is scarce.

use proptest::prelude::*;
use proptest::sample::select;
use warpforge::ops::attention::{Attention, Mask, ScoreBias, Scores};
use warpforge::{Arch, DType};

use super::TestResult;
use super::case::*;
use super::run::*;
use crate::harness::{cards_of, fail, is_simulated, with_little_memory};

/// What a card with little memory computes is what is expected, with the bits of one with more.
fn as_with_more(floor: Arch, case: &Case) -> TestResult {
    let little = with_little_memory(floor);
    let data = case.data();
    let (out, lse) = compute(&little, case, &data, None)?;
    for device in cards_of(floor).iter().filter(|device| is_simulated(device)) {
        let (want, want_lse) = compute(device, case, &data, None)?;
        same_bits(&format!("{case:?} on {little:?}, out"), &out, &want)?;
        same_bits(&format!("{case:?} on {little:?}, lse"), &lse, &want_lse)?;
    }
    verify((&little, None), case, &(out, lse), &expect(case, &data))
}

/// Kernels of each floor for many queries and for few, with blocks that share keys, in pages and not, with masks of
/// each sequence's own and sinks; groups of three and two sequences, and of one.
#[test]
fn gathered_for_some_sequences_at_a_time() -> TestResult {
    let (bf16, f16) = (DType::BF16, DType::F16);
    let biased = Scores { bias: ScoreBias::Additive, ..Scores::PLAIN };
    let blocked = Scores { blocks: Some(32), ..Scores::PLAIN };
    let short = vec![150, 0, 33, 149, 90];
    let long = vec![1100, 30, 0, 1090];
    for (floor, dtype, seq_q, lens, (heads, head_dim), page_size, window, scores, at_a_time) in [
        (Arch::Sm90a, bf16, 70, &short, ((4, 2), 64), Some(16), Some(40), Scores::PLAIN, 3),
        (Arch::Sm90a, bf16, 20, &short, ((2, 2), 128), None, None, blocked, 1),
        (Arch::Sm90a, f16, 20, &long, ((1, 1), 64), Some(64), None, Scores::PLAIN, 1),
        (Arch::Sm80, bf16, 37, &short, ((4, 2), 64), None, None, biased, 3),
        (Arch::Sm80, f16, 20, &long, ((1, 1), 64), None, None, Scores::PLAIN, 1),
        (Arch::Sm80, f16, 20, &short, ((2, 1), 64), Some(256), Some(60), Scores::PLAIN, 5),
        (Arch::Sm61, bf16, 2, &short, ((4, 2), 64), Some(32), None, Scores::PLAIN, 3),
        (Arch::Sm61, f16, 5, &short, ((2, 2), 64), None, None, Scores::PLAIN, 3),
    ] {
        let case = Case {
            lens: lens.clone(),
            capacity: lens[0],
            mask: Mask::Causal,
            sinks: Some(0.5),
            page_size,
            window,
            scores,
            is_fp8: true,
            ..plain(dtype, seq_q, 0, heads, head_dim)
        };
        let plan = Attention::plan(&with_little_memory(floor), case.problem()).map_err(fail)?;
        let wanted = format!("{at_a_time} of {} sequences are gathered at a time", lens.len());
        let report = plan.report().to_string();
        assert!(report.contains(&wanted), "{floor} {seq_q} {head_dim}: {report}");
        as_with_more(floor, &case)?;
    }
    Ok(())
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(16))]

    /// The same of any case.
    #[test]
    fn memory_changes_nothing(
        case in fp8_case().prop_filter("too much work", |case| 2 * case.work() <= 1 << 22),
        floor in select(&[Arch::Sm61, Arch::Sm80, Arch::Sm90a][..]),
    ) {
        as_with_more(floor, &case)?;
    }
}
