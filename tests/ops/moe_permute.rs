//! The sort by expert against its reference: exactly.

use abi::ops::moe_permute::{COUNTED_PAIRS, VARIANTS};
use proptest::prelude::*;
use testkit::strategies::{Rng, dims};
use warpforge::ops::moe_permute::{
    MoePermute, MoePermuteArgs, MoePermutePath, MoePermuteProblem, NO_POSITION, reference,
};
use warpforge::{DType, Device, Error, Tensor};

use crate::harness::{
    EVERY, Layout, Rows, Wanted, devices, devices_for, every_kernel, fail, on_executors, through_every_kernel,
};

/// Who gets the pairs.
#[derive(Clone, Copy, Debug)]
enum Spread {
    /// Everyone alike.
    Even,
    /// One expert.
    One(u32),
    /// Few experts, the others nothing.
    Few,
    /// Some ids are no expert's.
    Foreign,
}

#[derive(Clone, Debug)]
struct Case {
    problem: MoePermuteProblem,
    spread: Spread,
    seed: u64,
}

impl Case {
    /// Blocks of 1024 threads with some thirty barriers and shuffles; each 32 pairs are some twenty votes.
    fn work(&self) -> usize {
        let MoePermuteProblem { tokens, top_k, experts, .. } = self.problem;
        1024 * 150 + tokens * top_k * 100 + 64 * experts * self.problem.kinds.unwrap_or(1)
    }

    fn ids(&self) -> Vec<u32> {
        let MoePermuteProblem { tokens, top_k, experts, first_expert, .. } = self.problem;
        let mut rng = Rng::new(self.seed);
        let mut id = || match self.spread {
            Spread::Even => rng.below(experts) as u32,
            Spread::One(expert) => expert % experts as u32,
            Spread::Few => (rng.below(3) * experts / 3) as u32,
            Spread::Foreign => match rng.below(experts + 3) as u32 {
                id if id as usize == experts + 2 => u32::MAX,
                id => id,
            },
        };
        let first = first_expert as u32;
        let mut ids: Vec<u32> = (0..tokens * top_k).map(|_| id().saturating_add(first)).collect();
        // Experts before the first, too: 0, and the next one before.
        if let Spread::Foreign = self.spread {
            ids.iter_mut().step_by(5).for_each(|id| *id -= first.min(*id));
            ids.iter_mut().skip(2).step_by(7).for_each(|id| *id = first.saturating_sub(1));
        }
        ids
    }

    /// The kind of each token: some tokens are of none, where there are kinds.
    fn kinds(&self) -> Vec<u32> {
        let mut rng = Rng::new(self.seed ^ 1);
        let mut kind = |kinds: usize| match rng.below(kinds + 2) as u32 {
            kind if kind as usize == kinds + 1 => u32::MAX,
            kind => kind,
        };
        (0..self.problem.tokens).map(|_| self.problem.kinds.map_or(0, &mut kind)).collect()
    }
}

fn case() -> impl Strategy<Value = Case> {
    let experts = prop_oneof![3 => 1usize..140, 1 => Just(512), 1 => 1020usize..1030, 1 => Just(2048)];
    let spread = prop_oneof![
        3 => Just(Spread::Even),
        1 => any::<u32>().prop_map(Spread::One),
        1 => Just(Spread::Few),
        1 => Just(Spread::Foreign),
    ];
    let first = prop_oneof![2 => Just(0), 1 => 1usize..300, 1 => Just(i32::MAX as usize)];
    let kinds = prop_oneof![2 => Just(None), 1 => (1usize..9).prop_map(Some)];
    (dims(&[4, 32, 128], 600), 1usize..11, (experts, kinds), first, spread, any::<u64>()).prop_map(
        |(tokens, top_k, (experts, kinds), first_expert, spread, seed)| {
            let experts = experts.min(2048 / kinds.unwrap_or(1));
            let problem = MoePermuteProblem { tokens, top_k, experts, first_expert, kinds };
            Case { problem, spread, seed }
        },
    )
}

fn run(device: &Device, case: &Case, path: Option<MoePermutePath>) -> Result<(), TestCaseError> {
    let MoePermuteProblem { tokens, top_k, experts, first_expert, kinds } = case.problem;
    let groups = experts * kinds.unwrap_or(1);
    let stream = device.stream().map_err(fail)?;
    let plan = match path {
        None => MoePermute::plan(device, case.problem),
        Some(path) => MoePermute::plan_with(device, case.problem, path),
    };
    let plan = plan.map_err(fail)?;
    let (ids, of_tokens) = (case.ids(), case.kinds());
    let place = Layout::default();
    let input = |values: &[u32], cols: usize| {
        let wide: Vec<f64> = values.iter().map(|&value| f64::from(value)).collect();
        Rows::input(&stream, DType::U32, &wide, cols, place).map_err(fail)
    };
    let (ids_rows, kinds_rows) = (input(&ids, top_k)?, input(&of_tokens, 1)?);
    let of_kinds = kinds.map(|_| kinds_rows.view().reshape(&[tokens])).transpose().map_err(fail)?;
    let output = |rows, cols| Rows::output(&stream, DType::U32, rows, cols, place).map_err(fail);
    let (mut offsets, mut order, mut positions) =
        (output(1, groups + 1)?, output(tokens, top_k)?, output(tokens, top_k)?);
    let args = MoePermuteArgs {
        ids: ids_rows.view(),
        kinds: of_kinds,
        offsets: offsets.view_mut().reshape(&[groups + 1]).map_err(fail)?,
        order: order.view_mut().reshape(&[tokens * top_k]).map_err(fail)?,
        positions: positions.view_mut(),
    };
    plan.run(&stream, args).map_err(fail)?;
    let read = |rows: &Rows| -> Result<Vec<u32>, TestCaseError> {
        Ok(rows.read(&stream)?.into_iter().map(|value| value as u32).collect())
    };
    let own = (kinds.unwrap_or(1), &of_tokens[..]);
    let want = reference::moe_permute(&ids, first_expert..first_expert + experts, own);
    let got = (read(&offsets)?, read(&order)?, read(&positions)?);
    prop_assert!(
        got == want,
        "{:?} {:?} on {:?}: {:?}, expected {:?}",
        case.problem,
        path,
        device,
        got,
        want
    );
    Ok(())
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    for device in cards {
        for path in [MoePermutePath::Block, MoePermutePath::Chunks] {
            if VARIANTS.iter().any(|variant| wanted(variant.entry)) {
                run(device, case, Some(path))?;
            }
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "moe_permute",
        &[|case: &mut Case| case.problem.tokens = 0],
        case(),
        Case::work,
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("moe_permute", case(), Case::work, run_variants)
}

/// The reference's own promises, which the operators behind this one rely on.
#[test]
fn reference_is_a_stable_sort() {
    let ids = [3, 0, 9, 3, 1, 0, u32::MAX];
    let alike = (1, &[0u32; 7][..]);
    let (offsets, order, positions) = reference::moe_permute(&ids, 0..4, alike);
    assert_eq!(offsets, [0, 2, 3, 3, 5]);
    assert_eq!(order, [1, 5, 4, 0, 3, 2, 6]);
    assert_eq!(positions, [3, 0, NO_POSITION, 4, 2, 1, NO_POSITION]);
    let (offsets, order, positions) = reference::moe_permute(&ids, 1..4, alike);
    assert_eq!(offsets, [0, 1, 1, 3]);
    assert_eq!(order, [4, 0, 3, 1, 2, 5, 6]);
    assert_eq!(positions, [1, NO_POSITION, NO_POSITION, 2, 0, NO_POSITION, NO_POSITION]);
    // Two pairs of each token: of the second kind, of none, of the first kind.
    let (offsets, order, positions) = reference::moe_permute(&[1, 0, 1, 0, 5, 1], 0..2, (2, &[1, 2, 0]));
    assert_eq!(offsets, [0, 0, 1, 2, 3]);
    assert_eq!(order, [5, 1, 0, 2, 3, 4]);
    assert_eq!(positions, [2, 1, NO_POSITION, NO_POSITION, NO_POSITION, 0]);
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(64))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        for device in &on.devices() {
            run(device, &case, None)?;
        }
    }

    /// Both ways, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, |case| 3 * Case::work(case))) {
        run_variants(&on.cards(), &case, EVERY)?;
    }
}

/// Several chunks, the last not full, and fewer tokens than were planned.
#[test]
fn many_pairs() -> Result<(), TestCaseError> {
    let sizes = [
        (2500, 4, 60, Spread::Even),
        (1100, 8, 128, Spread::Foreign),
        (COUNTED_PAIRS as usize / 8 + 9, 8, 128, Spread::Even),
    ];
    for (tokens, top_k, experts, spread) in sizes {
        let case = Case { problem: MoePermuteProblem::new(tokens, top_k, experts), spread, seed: 1 };
        for device in &devices_for(2 * case.work()) {
            run(device, &case, None)?;
            run(device, &case, Some(MoePermutePath::Chunks))?;
        }
    }
    for device in &devices() {
        let stream = device.stream()?;
        let problem = MoePermuteProblem::new(COUNTED_PAIRS as usize, 2, 4);
        let plan = MoePermute::plan(device, problem)?;
        let ids = Tensor::from_slice(&stream, &[3, 2], &[3u32, 0, 3, 1, 0, 2])?;
        let empty = |shape: &[usize]| Tensor::empty(&stream, shape, DType::U32);
        let (mut offsets, mut order, mut positions) = (empty(&[5])?, empty(&[6])?, empty(&[3, 2])?);
        let args =
            MoePermuteArgs::new(ids.view(), offsets.view_mut(), order.view_mut(), positions.view_mut());
        plan.run(&stream, args)?;
        assert_eq!(offsets.to_vec::<u32>(&stream)?, [0, 2, 3, 4, 6]);
        assert_eq!(order.to_vec::<u32>(&stream)?, [1, 4, 3, 5, 0, 2]);
        assert_eq!(positions.to_vec::<u32>(&stream)?, [4, 0, 5, 2, 1, 3]);
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let plan = MoePermute::plan(device, MoePermuteProblem::new(4, 2, 8))?;
        let message = |ids: &[usize], offsets: usize, order: usize, positions: &[usize]| {
            let tensor = |shape: &[usize]| Tensor::zeros(&stream, shape, DType::U32);
            let (ids, mut positions) = (tensor(ids)?, tensor(positions)?);
            let (mut offsets, mut order) = (tensor(&[offsets])?, tensor(&[order])?);
            let (offsets, order) = (offsets.view_mut(), order.view_mut());
            let args = MoePermuteArgs::new(ids.view(), offsets, order, positions.view_mut());
            Ok::<_, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        assert_eq!(
            message(&[5, 2], 9, 10, &[5, 2])?,
            "moe_permute: ids: expected at most 4 tokens, as planned, got 5"
        );
        assert_eq!(
            message(&[4, 3], 9, 12, &[4, 3])?,
            "moe_permute: ids: expected shape [any, 2], got [4, 3]"
        );
        assert_eq!(message(&[4, 2], 8, 8, &[4, 2])?, "moe_permute: offsets: expected shape [9], got [8]");
        assert_eq!(message(&[4, 2], 9, 7, &[4, 2])?, "moe_permute: order: expected shape [8], got [7]");
        assert_eq!(
            message(&[4, 2], 9, 8, &[8, 1])?,
            "moe_permute: positions: expected shape [4, 2], got [8, 1]"
        );
        let refused = |tokens, top_k, experts| {
            let problem = MoePermuteProblem::new(tokens, top_k, experts);
            MoePermute::supports(device, &problem).unwrap_err().to_string()
        };
        let of_kinds = MoePermuteProblem { kinds: Some(20), ..MoePermuteProblem::new(1, 1, 128) };
        assert_eq!(
            MoePermute::supports(device, &of_kinds).unwrap_err().to_string(),
            "moe_permute: problem: expected 1 to 2048 experts of all kinds, got 20 kinds of 128"
        );
        assert_eq!(refused(1, 1, 0), "moe_permute: problem: expected 1 to 2048 experts, got 0");
        assert_eq!(refused(1, 0, 8), "moe_permute: problem: expected a top_k of at least 1, got 0");
        assert_eq!(
            refused(1 << 30, 2, 8),
            "moe_permute: problem: expected number of pairs below 2^31, got 2147483648"
        );
    }
    Ok(())
}
