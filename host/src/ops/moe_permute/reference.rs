//! The sort as plain loops: the specification.

use std::ops::Range;

use super::NO_POSITION;

/// Offsets, order and positions, for the experts with these ids; see [`super::MoePermute`].
pub fn moe_permute(ids: &[u32], experts: Range<usize>) -> (Vec<u32>, Vec<u32>, Vec<u32>) {
    let expert = |id: &u32| Some(*id as usize).filter(|id| experts.contains(id)).map(|id| id - experts.start);
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    // A stable sort; pairs of no expert are alike.
    order.sort_by_key(|&pair| expert(&ids[pair as usize]).unwrap_or(experts.len()));
    let below = |own: usize| ids.iter().filter_map(expert).filter(|&expert| expert < own).count() as u32;
    let offsets = (0..=experts.len()).map(below).collect();
    let mut positions = vec![NO_POSITION; ids.len()];
    for (place, &pair) in order.iter().enumerate() {
        if expert(&ids[pair as usize]).is_some() {
            positions[pair as usize] = place as u32;
        }
    }
    (offsets, order, positions)
}
