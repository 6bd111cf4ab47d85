//! Sums over the ranks of a group, through memory that they all access: parameters, entry points, and where what lies.
//!
//! Each rank has an *exchange*: memory on its own device, which all ranks access.
//!
//! ```text
//! 0               control of block 0: a word per rank, how many phases that rank has told this block of;
//!                 at COUNTER_BYTES how many this rank's block has told the others of
//! CONTROL_BYTES   control of block 1, … of MAX_BLOCKS
//! GIVEN_UP_BYTES  a word: not 0 once a block of this rank has given up
//! HEADER_BYTES    slots: two for each block
//! ```

use crate::DType;

/// Sizes of one launch.
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AllReduceDims {
    /// Elements of x.
    pub len: u64,
    /// Pieces of 16 bytes that a block does, of those that x has.
    pub block_pieces: u64,
    /// How long a block waits for its like at the other ranks.
    pub timeout_ns: u64,
    /// Bytes of a slot: a multiple of 16.
    pub slot_bytes: u32,
    /// This rank.
    pub rank: u32,
    /// Ranks of the group.
    pub size: u32,
    /// 1 where x is aligned to 16 bytes.
    pub is_aligned: u32,
}

const _: () = assert!(size_of::<AllReduceDims>() == 40);
impl crate::Params for AllReduceDims {}

/// Threads of a block.
pub const THREADS: u32 = 512;
/// Most blocks of a rank.
pub const MAX_BLOCKS: u32 = 36;
/// Most ranks.
pub const MAX_RANKS: usize = 8;

/// Bytes of a block's control.
pub const CONTROL_BYTES: u32 = 256;
/// Where in its control a block counts its phases: not in the line that the others write.
pub const COUNTER_BYTES: u32 = 128;
/// Where the word is that says that a block has given up.
pub const GIVEN_UP_BYTES: u32 = MAX_BLOCKS * CONTROL_BYTES;
/// Bytes before the slots.
pub const HEADER_BYTES: u32 = GIVEN_UP_BYTES + CONTROL_BYTES;
/// Shared memory of a block.
pub const SMEM_BYTES: u32 = 16;

/// Bytes of a rank's exchange.
pub const fn exchange_bytes(slot_bytes: u32) -> u64 {
    HEADER_BYTES as u64 + 2 * MAX_BLOCKS as u64 * slot_bytes as u64
}

/// Where in an exchange a block's slot for phases of this parity begins.
#[inline(always)]
pub const fn slot_at(block: u32, parity: u32, slot_bytes: u32) -> u64 {
    HEADER_BYTES as u64 + (2 * block + parity) as u64 * slot_bytes as u64
}

/// How often what is summed crosses between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Shots {
    /// Once: every rank reads all that the others have.
    One,
    /// Twice: every rank sums a part, and reads the others' sums.
    Two,
}

/// One kernel.
#[derive(Debug, PartialEq)]
#[non_exhaustive]
pub struct AllReduceVariant {
    /// The entry point's name.
    pub entry: &'static str,
    /// Type of the elements.
    pub dtype: DType,
    /// How the sum is made.
    pub shots: Shots,
    /// Most ranks of a group.
    pub max_ranks: usize,
}

/// Hands every row of the table to the macro `$callback`: the type, its `DType`, the shots, the most ranks, and how
/// many pieces a thread has in flight.
#[macro_export]
macro_rules! all_reduce_table {
    ($callback:path) => {
        $callback! {
            all_reduce_f32_one_shot__ranks2__sm61 => f32, F32, One, 2, 4;
            all_reduce_f32_one_shot__ranks8__sm61 => f32, F32, One, 8, 2;
            all_reduce_f32_two_shot__ranks2__sm61 => f32, F32, Two, 2, 4;
            all_reduce_f32_two_shot__ranks8__sm61 => f32, F32, Two, 8, 2;
            all_reduce_f16_one_shot__ranks2__sm61 => f16, F16, One, 2, 4;
            all_reduce_f16_one_shot__ranks8__sm61 => f16, F16, One, 8, 2;
            all_reduce_f16_two_shot__ranks2__sm61 => f16, F16, Two, 2, 4;
            all_reduce_f16_two_shot__ranks8__sm61 => f16, F16, Two, 8, 2;
            all_reduce_bf16_one_shot__ranks2__sm61 => bf16, BF16, One, 2, 4;
            all_reduce_bf16_one_shot__ranks8__sm61 => bf16, BF16, One, 8, 2;
            all_reduce_bf16_two_shot__ranks2__sm61 => bf16, BF16, Two, 2, 4;
            all_reduce_bf16_two_shot__ranks8__sm61 => bf16, BF16, Two, 8, 2;
        }
    };
}

macro_rules! variants {
    ($($entry:ident => $type:ident, $dtype:ident, $shots:ident, $ranks:literal, $pieces:literal;)*) => {
        /// Every kernel.
        pub const VARIANTS: &[AllReduceVariant] = &[$(AllReduceVariant {
            entry: stringify!($entry),
            dtype: DType::$dtype,
            shots: Shots::$shots,
            max_ranks: $ranks,
        }),*];
    };
}
all_reduce_table!(variants);

/// The kernel for elements of this type and so many ranks; none where there are too many.
pub fn variant(dtype: DType, shots: Shots, ranks: usize) -> Option<&'static AllReduceVariant> {
    VARIANTS.iter().find(|row| (row.dtype, row.shots) == (dtype, shots) && ranks <= row.max_ranks)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_fill_an_exchange() {
        const {
            assert!(4 * MAX_RANKS as u32 <= COUNTER_BYTES && COUNTER_BYTES + 4 <= CONTROL_BYTES);
            assert!(HEADER_BYTES.is_multiple_of(16) && GIVEN_UP_BYTES + 4 <= HEADER_BYTES);
        }
        assert_eq!(slot_at(0, 0, 64), u64::from(HEADER_BYTES));
        assert_eq!(slot_at(MAX_BLOCKS - 1, 1, 64) + 64, exchange_bytes(64));
    }

    #[test]
    fn the_kernel_of_fewest_ranks() {
        let entry = |ranks| variant(DType::BF16, Shots::Two, ranks).map(|row| row.entry);
        assert_eq!(entry(2), Some("all_reduce_bf16_two_shot__ranks2__sm61"));
        assert_eq!([entry(3), entry(8)], [Some("all_reduce_bf16_two_shot__ranks8__sm61"); 2]);
        assert_eq!(entry(9), None);
        assert!(variant(DType::I8, Shots::One, 2).is_none());
    }
}
