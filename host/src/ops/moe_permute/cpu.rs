//! The sort on the CPU: two passes over the pairs.

use abi::ops::moe_permute::NO_POSITION;

use super::{MoePermuteArgs, MoePermuteProblem};

pub(in crate::ops) fn run(problem: &MoePermuteProblem, args: &mut MoePermuteArgs<'_>) {
    let &MoePermuteProblem { experts, first_expert, .. } = problem;
    let ids = args.ids.host_slice::<u32>();
    let offsets = args.offsets.host_slice_mut::<u32>();
    let (order, positions) = (args.order.host_slice_mut::<u32>(), args.positions.host_slice_mut::<u32>());
    let bin = |id: u32| (id as usize).checked_sub(first_expert).map_or(experts, |expert| expert.min(experts));
    offsets.fill(0);
    for &id in ids.iter().filter(|&&id| bin(id) < experts) {
        offsets[bin(id) + 1] += 1;
    }
    for expert in 0..experts {
        offsets[expert + 1] += offsets[expert];
    }
    // From here on where the next pair of each goes; undone below.
    for (pair, &id) in ids.iter().enumerate() {
        let place = offsets[bin(id)];
        offsets[bin(id)] += 1;
        order[place as usize] = pair as u32;
        positions[pair] = if bin(id) < experts { place } else { NO_POSITION };
    }
    // Each has moved to the start of the next.
    offsets.copy_within(0..experts, 1);
    offsets[0] = 0;
}
