//! Attention on tensor cores: the borders of tiles, of steps and of masks, and what is not finite beside them.

use abi::ops::attention::{AttentionTile, AttentionVariant, PREFILL_MMA_VARIANTS, WGMMA_VARIANTS};
use warpforge::ops::attention::{Mask, PAGE_SIZES, ScoreBias, Scores};
use warpforge::{Arch, DType, Device};

use super::TestResult;
use super::case::*;
use super::run::*;
use crate::harness::{cards_of, devices_for, fail, one_sm};

/// Runs a case with a NaN in q (0), k (1) or v (2) at the query or key of that number, in the last head: it stays in
/// the rows (of v: and the column) that it enters, and all other bits are as without it.
fn nan_stays(device: &Device, case: &Case, places: &[(usize, usize)]) -> TestResult {
    let (len, (heads_q, heads_kv), head_dim) = (case.lens[0], case.heads, case.head_dim);
    let width = case.head_dim_v;
    let own = case.own(0, len);
    let sequence = case.sequence(len, &own);
    let clean = case.data();
    let (want, _) = compute(device, case, &clean, None)?;
    for &(tensor, place) in places {
        let mut data = clean.clone();
        let element = match tensor {
            0 => (place * heads_q + heads_q - 1) * head_dim + 5,
            1 => (place * heads_kv + heads_kv - 1) * head_dim + 9,
            _ => (place * heads_kv + heads_kv - 1) * width + 9,
        };
        data[tensor][element] = f64::NAN;
        let (got, _) = compute(device, case, &data, None)?;
        for (index, (got, want)) in std::iter::zip(&got, &want).enumerate() {
            let (row, head, col) = (index / width / heads_q, index / width % heads_q, index % width);
            let enters = sequence.sees(head, row, place) && head >= heads_q - heads_q / heads_kv;
            let hit = match tensor {
                0 => row == place && head == heads_q - 1,
                1 => enters,
                _ => enters && col == 9,
            };
            let what = format!("{device:?} {case:?} tensor {tensor} at {place} [{row}, {head}, {col}]");
            if hit {
                assert!(got.is_nan(), "{what}: {got}");
            } else {
                assert_eq!(got.to_bits(), want.to_bits(), "{what}");
            }
        }
    }
    Ok(())
}

/// A NaN at the place of the query before the last.
#[test]
fn nan_stays_where_it_is() -> TestResult {
    for dtype in DType::FLOATS {
        for (seq_q, len) in [(70, 90), (3, 300), (4, 256)] {
            let case = Case { mask: Mask::Causal, ..plain(dtype, seq_q, len, (4, 2), 64) };
            for device in &devices_for(case.work()) {
                nan_stays(device, &case, &[(0, seq_q - 2), (1, len - 2), (2, len - 2)])?;
            }
        }
    }
    Ok(())
}

/// Tiles of queries and steps of keys on tensor cores, at both of whose ends a mask cuts: results, and NaNs that some
/// rows of a tile see and others do not.
#[test]
fn borders_on_tensor_cores() -> TestResult {
    for device in &[Arch::Sm80, Arch::Sm90a].into_iter().flat_map(cards_of).collect::<Vec<_>>() {
        for (dtype, heads, head_dim, window, page_size, place) in [
            (DType::BF16, (2, 1), 64, None, None, Some((0, 140))),
            (DType::F16, (1, 1), 128, Some(100), Some(64), Some((1, 180))),
            (DType::BF16, (1, 1), 256, Some(150), Some(32), None),
        ] {
            let mask = Mask::Causal;
            let case = Case { mask, window, page_size, ..plain(dtype, 200, 290, heads, head_dim) };
            let data = case.data();
            let results = compute(device, &case, &data, None)?;
            verify((device, None), &case, &results, &expect(&case, &data))?;
            // Keys that are cut off by the mask at either end.
            let places: Vec<_> = place.into_iter().chain([(2, 120), (2, 260)]).collect();
            nan_stays(device, &case, &places)?;
            // All that lies beyond a sequence's keys is NaN.
            let case = Case { lens: vec![150], capacity: 200, ..case };
            let data = case.data();
            let results = compute(device, &case, &data, None)?;
            verify((device, None), &case, &results, &expect(&case, &data))?;
        }
    }
    Ok(())
}

/// Tiles one after the other in one block, on Hopper's tensor cores, have the bits that they have in blocks of their
/// own: long ones and short ones, those without keys at either end and between, values that are not finite, and steps
/// that are left out.
#[test]
fn tiles_of_one_block() -> TestResult {
    let own = &cards_of(Arch::Sm90a)[0];
    let few = Scores { blocks: Some(64), ..Scores::PLAIN };
    let masked = Scores { bias: ScoreBias::Additive, ..Scores::PLAIN };
    for (entry, seq_q, lens, window, scores) in [
        ("attention_f16__prefill_d64__sm90a", 200, vec![290, 0, 0, 100], None, Scores::PLAIN),
        ("attention_bf16__prefill_d128__sm90a", 150, vec![0, 260, 90, 0], Some(120), Scores::PLAIN),
        ("attention_f16__prefill_d128__sm90a", 300, vec![400], None, few),
        ("attention_bf16__prefill_masked_d128__sm90a", 150, vec![0, 260, 90, 0], Some(120), masked),
        ("attention_f16__prefill_masked_d64__sm90a", 300, vec![400], None, masked),
        ("attention_bf16__prefill_d256__sm90a", 140, vec![170, 0, 60], None, Scores::PLAIN),
    ] {
        let variant =
            WGMMA_VARIANTS.iter().find(|variant| variant.entry == entry).ok_or_else(|| fail(entry))?;
        let width = variant.tile.max_head_dims().0 as usize;
        let capacity = lens.iter().copied().max().unwrap_or(0);
        let mask = if scores.blocks.is_some() { Mask::None } else { Mask::Causal };
        let (sinks, seed) = (Some(0.5), 1 << 48);
        let case = plain(variant.dtype, seq_q, 0, (1, 1), width);
        let case = Case { lens, capacity, mask, window, scores, sinks, seed, ..case };
        let mut data = case.data();
        // Of one of the last keys of a sequence, which not all rows of a tile see.
        let longest = case.lens.iter().position(|&len| len == capacity).unwrap_or(0);
        data[2][((longest + 1) * capacity - 2) * width + 9] = f64::NAN;
        let (want_out, want_lse) = compute(own, &case, &data, Some(variant))?;
        let (out, lse) = compute(&one_sm(), &case, &data, Some(variant))?;
        same_bits(entry, &out, &want_out)?;
        same_bits(&format!("{entry}, lse"), &lse, &want_lse)?;
    }
    Ok(())
}

/// Block masks over many words, of which few blocks are seen, on every device; and those whose blocks are smaller and
/// larger than the steps of Hopper's tensor cores, some rows of which see a block.
#[test]
fn blocks() -> TestResult {
    let few = 1 << 48;
    for (dtype, seq_q, len, head_dim, size, seed) in [
        (DType::F32, 70, 1100, 64, 16, few),
        (DType::BF16, 200, 1000, 128, 128, few + 1),
        (DType::F16, 130, 300, 256, 32, 1),
        (DType::BF16, 200, 290, 64, 64, 2),
    ] {
        let scores = Scores { blocks: Some(size), ..Scores::PLAIN };
        let case = Case { scores, seed, ..plain(dtype, seq_q, len, (2, 1), head_dim) };
        let data = case.data();
        let expected = expect(&case, &data);
        for device in
            &cards_of(Arch::Sm90a).into_iter().chain(devices_for(case.work() / 4)).collect::<Vec<_>>()
        {
            let results = compute(device, &case, &data, None)?;
            verify((device, None), &case, &results, &expected)?;
            if len < 300 {
                nan_stays(device, &case, &[(1, 150), (2, 40), (2, 250)])?;
            }
        }
    }
    Ok(())
}

/// Masks of both kinds at a time, which Hopper's tensor cores know: some blocks that a row's bias hides as well, steps
/// that are left out, borders of a window, and NaNs in keys that some rows of a tile see.
#[test]
fn biases_and_blocks() -> TestResult {
    for (dtype, bias, head_dims, blocks, soft_cap, window, seed) in [
        (DType::BF16, ScoreBias::Additive, (128, 128), 64, None, Some(170), 1),
        (DType::F16, ScoreBias::Boolean, (64, 64), 16, Some(50.0), None, 2),
        (DType::F16, ScoreBias::Additive, (72, 128), 128, None, None, 3),
    ] {
        let scores = Scores { bias, soft_cap, blocks: Some(blocks) };
        let mask = if window.is_some() { Mask::Causal } else { Mask::None };
        let (head_dim, head_dim_v) = head_dims;
        let plain = plain(dtype, 140, 300, (2, 1), head_dim);
        let case = Case { scores, head_dim_v, mask, window, seed, ..plain };
        let data = case.data();
        let expected = expect(&case, &data);
        for device in &cards_of(Arch::Sm90a) {
            let results = compute(device, &case, &data, None)?;
            verify((device, None), &case, &results, &expected)?;
            nan_stays(device, &case, &[(1, 150), (2, 40), (2, 298)])?;
        }
    }
    Ok(())
}

/// Additive and boolean masks on tensor cores, with scales and lengths of all kinds; NaNs in keys that some rows of a
/// tile see.
#[test]
fn biases_on_tensor_cores() -> TestResult {
    for device in &cards_of(Arch::Sm80).into_iter().chain(cards_of(Arch::Sm90a)).collect::<Vec<_>>() {
        for (dtype, bias, (seq_q, len), heads, head_dim, scale, soft_cap, mask, page_size, seed) in [
            (DType::BF16, ScoreBias::Additive, (70, 150), (2, 1), 64, None, None, Mask::Causal, Some(32), 1),
            (
                DType::F16,
                ScoreBias::Boolean,
                (40, 135),
                (1, 1),
                128,
                Some(-0.125),
                Some(2.0),
                Mask::None,
                None,
                2 + (1 << 41),
            ),
            (
                DType::F16,
                ScoreBias::Additive,
                (20, 97),
                (2, 2),
                128,
                Some(0.0),
                None,
                Mask::None,
                Some(16),
                3,
            ),
            (
                DType::BF16,
                ScoreBias::Boolean,
                (20, 70),
                (1, 1),
                256,
                None,
                None,
                Mask::Causal,
                None,
                4 + (1 << 40),
            ),
        ] {
            let scores = Scores { bias, soft_cap, blocks: None };
            let plain = plain(dtype, seq_q, len, heads, head_dim);
            let case = Case { scores, scale, mask, page_size, seed, ..plain };
            let data = case.data();
            let results = compute(device, &case, &data, None)?;
            verify((device, None), &case, &results, &expect(&case, &data))?;
            nan_stays(device, &case, &[(1, 40), (2, len - 2)])?;
        }
    }
    Ok(())
}

/// Each kernel of `mma.sync` for pages has the bits of the one for keys in one piece: pages of all sizes, whose keys
/// end anywhere, a sequence without keys, pages that two sequences share, masks at both ends, a cap, sinks, and values
/// that are not finite where a tile ends.
#[test]
fn pages_of_every_tile() -> TestResult {
    let tile = |variant: &AttentionVariant| match variant.tile {
        AttentionTile::PrefillMma { dim, masked, split, paged, .. } => {
            (variant.dtype, dim, masked, split, paged)
        }
        _ => unreachable!("a table of one kind"),
    };
    for device in &cards_of(Arch::Sm80) {
        for (index, paged) in PREFILL_MMA_VARIANTS.iter().filter(|variant| tile(variant).4).enumerate() {
            let (dtype, dim, masked, split, _) = tile(paged);
            let plain_tile = (dtype, dim, masked, split, false);
            let apart = PREFILL_MMA_VARIANTS.iter().find(|variant| tile(variant) == plain_tile);
            let apart = apart.ok_or_else(|| fail(paged.entry))?;
            let bias = match (masked, index % 2) {
                (false, _) => ScoreBias::None,
                (true, 0) => ScoreBias::Additive,
                (true, _) => ScoreBias::Boolean,
            };
            let case = Case {
                lens: vec![201, 0, 77, 150],
                capacity: 210,
                mask: if index % 3 == 0 { Mask::None } else { Mask::Causal },
                window: (index % 4 == 1).then_some(70),
                scores: Scores { bias, soft_cap: (index % 5 == 2).then_some(2.0), blocks: None },
                sinks: Some(0.5),
                seed: index as u64,
                ..plain(dtype, 37, 0, (2, 1), dim as usize - 8 * (index % 2))
            };
            let page_size = PAGE_SIZES[index % PAGE_SIZES.len()];
            let mut data = case.data();
            // The first page of the first sequence is the last one's, too.
            for (values, width) in [(1, case.head_dim), (2, case.head_dim_v)] {
                let keys = page_size.min(150);
                data[values].copy_within(..keys * width, 3 * case.capacity * width);
            }
            // Of the key before the last of the third sequence, which not all rows see.
            data[2][(2 * case.capacity + 75) * case.head_dim_v + 3] = f64::INFINITY;
            let case_in_pages = Case { page_size: Some(page_size), ..case.clone() };
            let (out, lse) = compute(device, &case_in_pages, &data, Some(paged))?;
            let (want, want_lse) = compute(device, &case, &data, Some(apart))?;
            same_bits(&format!("{}, out", paged.entry), &out, &want)?;
            same_bits(&format!("{}, lse", paged.entry), &lse, &want_lse)?;
        }
    }
    Ok(())
}

/// The same for few queries, which see different keys of one block.
#[test]
fn borders_of_few_queries_on_tensor_cores() -> TestResult {
    for device in &cards_of(Arch::Sm80) {
        for (dtype, len, head_dim, window, page_size, is_fp8) in [
            // All keys of the second split are seen by a row of the first tile, but not by all.
            (DType::BF16, 513, 64, None, Some(16), false),
            (DType::F16, 300, 128, Some(40), None, false),
            (DType::BF16, 300, 256, Some(200), Some(32), false),
            (DType::BF16, 300, 128, Some(40), Some(16), true),
        ] {
            let mask = Mask::Causal;
            let case = Case { mask, window, page_size, is_fp8, ..plain(dtype, 9, len, (4, 2), head_dim) };
            let data = case.data();
            let results = compute(device, &case, &data, None)?;
            verify((device, None), &case, &results, &expect(&case, &data))?;
            let first = len - window.unwrap_or(len);
            nan_stays(device, &case, &[(0, 5), (1, len - 4), (2, len - 4), (2, 100), (2, first)])?;
        }
        // A key before the window, beside keys in it.
        let (mask, window) = (Mask::Causal, Some(40));
        let case = Case { mask, window, ..plain(DType::F16, 1, 300, (4, 2), 128) };
        nan_stays(device, &case, &[(1, 258), (2, 258)])?;
    }
    Ok(())
}

/// Few queries whose values are in the keys' rows: a NaN in one makes those rows NaN that see it.
#[test]
fn borders_of_latent_decode() -> TestResult {
    for device in [Arch::Sm80, Arch::Sm90a].iter().flat_map(|&floor| cards_of(floor)) {
        // Two tiles of rows, two or three steps of keys.
        let (mask, window, page_size) = (Mask::Causal, Some(50), Some(16));
        let (head_dim_v, values) = (512, Place::InKeys);
        let plain = plain(DType::BF16, 3, 70, (11, 1), 576);
        let case = Case { mask, window, page_size, head_dim_v, values, ..plain };
        nan_stays(&device, &case, &[(0, 1), (1, 68), (1, 69), (1, 18)])?;
    }
    Ok(())
}
