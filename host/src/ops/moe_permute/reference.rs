//! The sort as plain loops: the specification.

use std::ops::Range;

use super::NO_POSITION;

/// Offsets, order and positions, for the experts with these ids; see [`super::MoePermute`]. `kinds` are how many kinds
/// of tokens there are, and that of each token.
pub fn moe_permute(
    ids: &[u32],
    experts: Range<usize>,
    (kinds, of_tokens): (usize, &[u32]),
) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let top_k = ids.len().checked_div(of_tokens.len()).unwrap_or(1);
    let group = |pair: usize| {
        let (id, kind) = (ids[pair] as usize, of_tokens[pair / top_k] as usize);
        let is_of_one = experts.contains(&id) && kind < kinds;
        is_of_one.then(|| kind * experts.len() + id - experts.start)
    };
    let groups = kinds * experts.len();
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    // A stable sort; pairs of no expert are alike.
    order.sort_by_key(|&pair| group(pair as usize).unwrap_or(groups));
    let below = |own: usize| (0..ids.len()).filter_map(group).filter(|&group| group < own).count() as u32;
    let offsets = (0..=groups).map(below).collect();
    let mut positions = vec![NO_POSITION; ids.len()];
    for (place, &pair) in order.iter().enumerate() {
        if group(pair as usize).is_some() {
            positions[pair as usize] = place as u32;
        }
    }
    (offsets, order, positions)
}
