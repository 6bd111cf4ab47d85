//! Philox4x32-10, a counter-based random number generator: host and device draw the same numbers, in any order.
//!
//! Source: Salmon, Moraes, Dror and Shaw, *Parallel Random Numbers: As Easy as 1, 2, 3* (SC 2011), section 3.3 and
//! table 2.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
/// Added to the key after each round: the golden ratio and √3 − 1.
const WEYL: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: u32 = 10;

/// 128 random bits for this counter under this key; another counter or key gives independent ones.
#[inline(always)]
pub const fn philox4x32(counter: [u32; 4], key: [u32; 2]) -> [u32; 4] {
    let [mut c0, mut c1, mut c2, mut c3] = counter;
    let [mut k0, mut k1] = key;
    let mut round = 0;
    while round < ROUNDS {
        let p0 = c0 as u64 * MULTIPLIERS[0] as u64;
        let p1 = c2 as u64 * MULTIPLIERS[1] as u64;
        (c0, c1, c2, c3) = ((p1 >> 32) as u32 ^ c1 ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c3 ^ k1, p0 as u32);
        k0 = k0.wrapping_add(WEYL[0]);
        k1 = k1.wrapping_add(WEYL[1]);
        round += 1;
    }
    [c0, c1, c2, c3]
}

#[cfg(test)]
mod tests {
    use super::philox4x32;

    /// The authors' published known answers.
    #[test]
    fn known_answers() {
        let cases = [
            ([0; 4], [0; 2], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([u32::MAX; 4], [u32::MAX; 2], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xa409_3822, 0x299f_31d0],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (counter, key, expected) in cases {
            assert_eq!(philox4x32(counter, key), expected, "{counter:08x?} {key:08x?}");
        }
    }
}
