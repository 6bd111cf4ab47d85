//! The sort as plain loops: the specification.

use super::NO_POSITION;

/// Offsets, order and positions; see [`super::MoePermute`].
pub fn moe_permute(ids: &[u32], experts: usize) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    // A stable sort; pairs of no expert are alike.
    order.sort_by_key(|&pair| (ids[pair as usize] as usize).min(experts));
    let below = |expert: usize| ids.iter().filter(|&&id| (id as usize) < expert).count() as u32;
    let offsets = (0..=experts).map(below).collect();
    let mut positions = vec![NO_POSITION; ids.len()];
    for (place, &pair) in
        order.iter().enumerate().filter(|&(_, &pair)| (ids[pair as usize] as usize) < experts)
    {
        positions[pair as usize] = place as u32;
    }
    (offsets, order, positions)
}
