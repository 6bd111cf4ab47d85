//! The sort on the CPU: two passes over the pairs.

use abi::ops::moe_permute::NO_POSITION;

use super::{MoePermuteArgs, MoePermuteProblem};

pub(in crate::ops) fn run(problem: &MoePermuteProblem, args: &mut MoePermuteArgs<'_>) {
    let &MoePermuteProblem { experts, first_expert, top_k, .. } = problem;
    let ids = args.ids.host_slice::<u32>();
    let kinds = args.kinds.as_ref().map(|kinds| kinds.host_slice::<u32>());
    let groups = problem.groups();
    let offsets = args.offsets.host_slice_mut::<u32>();
    let (order, positions) = (args.order.host_slice_mut::<u32>(), args.positions.host_slice_mut::<u32>());
    let bin = |pair: usize| {
        let expert = (ids[pair] as usize).checked_sub(first_expert).filter(|&expert| expert < experts);
        let kind = kinds.map_or(0, |kinds| kinds[pair / top_k] as usize);
        expert.map_or(groups, |expert| kind.saturating_mul(experts).saturating_add(expert).min(groups))
    };
    offsets.fill(0);
    for bin in (0..ids.len()).map(bin).filter(|&bin| bin < groups) {
        offsets[bin + 1] += 1;
    }
    for group in 0..groups {
        offsets[group + 1] += offsets[group];
    }
    // From here on where the next pair of each goes; undone below.
    for (pair, position) in positions.iter_mut().enumerate() {
        let bin = bin(pair);
        let place = offsets[bin];
        offsets[bin] += 1;
        order[place as usize] = pair as u32;
        *position = if bin < groups { place } else { NO_POSITION };
    }
    // Each has moved to the start of the next.
    offsets.copy_within(0..groups, 1);
    offsets[0] = 0;
}
