//! Growth of a pool: where the device's memory joins, and what several streams have freed.

use proptest::prelude::*;

use super::ledger::{joining_pool, pool};
use super::tests::other_queue;
use super::*;

const MIB: usize = 1 << 20;

/// A larger block takes what is free at the end, and only what lacks comes from the device.
#[test]
fn a_larger_block_grows_out_of_the_last() -> Result<(), Error> {
    let (ledger, pool, queue) = joining_pool(usize::MAX / 2, 2 * MIB);
    let kept = pool.allocate(8 * MIB, &queue)?;
    let mut last = pool.allocate(6 * MIB, &queue)?.address();
    for megabytes in [10, 20, 40, 80] {
        let block = pool.allocate(megabytes * MIB, &queue)?;
        assert_eq!(block.address(), last, "{megabytes} MiB");
        last = block.address();
    }
    assert_eq!((pool.stats().reserved_bytes, ledger.held_bytes()), (88 * MIB, 88 * MIB));
    assert_eq!(pool.map().segments.len(), 1);
    // Each part goes back by itself.
    assert_eq!(pool.trim()?, 80 * MIB);
    assert_eq!((ledger.held_bytes(), pool.stats().largest_free_bytes), (8 * MIB, 0));
    drop(kept);
    assert_eq!((pool.trim()?, ledger.held_bytes()), (8 * MIB, 0));
    Ok(())
}

/// Blocks that came one by one are a larger one when they are free.
#[test]
fn neighbours_that_came_one_by_one_join() -> Result<(), Error> {
    let (ledger, pool, queue) = joining_pool(usize::MAX / 2, 2 * MIB);
    let blocks: Vec<Block> = (0..16).map(|_| pool.allocate(4 * MIB, &queue).unwrap()).collect();
    drop(blocks);
    assert_eq!(pool.stats().largest_free_bytes, 64 * MIB);
    let whole = pool.allocate(64 * MIB, &queue)?;
    assert_eq!((pool.stats().num_from_device, ledger.held_bytes()), (16, 64 * MIB));
    drop(whole);
    // A live block in the middle keeps its own part alone.
    let [low, mid, high] = [0, 1, 2].map(|_| pool.allocate(20 * MIB, &queue).unwrap());
    drop((low, high));
    assert_eq!(pool.trim()?, 44 * MIB);
    assert_eq!((ledger.held_bytes(), pool.stats().in_use_bytes), (20 * MIB, 20 * MIB));
    assert_eq!(pool.map().segments.len(), 1);
    drop(mid);
    Ok(())
}

/// What the device refuses leaves the free end as it was.
#[test]
fn growth_that_is_refused_changes_nothing() -> Result<(), Error> {
    let (ledger, pool, queue) = joining_pool(16 * MIB, 2 * MIB);
    let kept = pool.allocate(8 * MIB, &queue)?;
    drop(pool.allocate(6 * MIB, &queue)?);
    assert!(matches!(pool.allocate(12 * MIB, &queue), Err(Error::OutOfMemory { .. })));
    // All that was free went back before that was said.
    assert_eq!(ledger.held_bytes(), 8 * MIB);
    assert_eq!(pool.allocate(8 * MIB, &queue)?.address(), kept.address() + 8 * MIB as u64);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(100) })]

    /// RMM's issue 2039: what two streams have freed lies side by side, each stream's parts too small for a request and
    /// all together large enough, on a device that has no more to give. The request is served without the device, from
    /// either stream, whichever freed which part.
    #[test]
    fn what_two_streams_have_freed_is_one_piece(
        parts in prop::collection::vec((1usize..20, any::<bool>()), 2..12),
        asks_second in any::<bool>(),
        joins in any::<bool>(),
    ) {
        let total: usize = parts.iter().map(|&(megabytes, _)| size_class(megabytes * MIB)).sum();
        let total = size_class(total);
        let (ledger, pool, first) = if joins { joining_pool(total, MIB) } else { pool(total) };
        let queues = [first, other_queue()];
        // One piece of the device's, cut anew.
        drop(pool.allocate(total, &queues[0]));
        let blocks: Vec<Block> = parts
            .iter()
            .map(|&(megabytes, second)| pool.allocate(megabytes * MIB, &queues[usize::from(second)]).unwrap())
            .collect();
        prop_assert_eq!(ledger.held_bytes(), total);
        drop(blocks);
        let asked = pool.stats().num_from_device;
        let whole = pool.allocate(total, &queues[usize::from(asks_second)]);
        prop_assert!(whole.is_ok(), "{whole:?}");
        prop_assert_eq!((pool.stats().num_from_device, ledger.held_bytes()), (asked, total));
    }
}
