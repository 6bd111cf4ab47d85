//! How matrices are spread over the registers of lanes.
//!
//! Operands of `mma.sync` and `wgmma` are found by their place in a matrix: a at (row, k), b at (k, column), c and d at
//! (row, column). An element of `bits` bits shares its register with its neighbours along k, the lowest k lowest.

/// Whether `ldmatrix` and `stmatrix` transpose.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub enum Transpose {
    /// As stored.
    No,
    /// Transposed.
    Yes,
}

/// Where an element is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Place {
    /// The lane of a warp, or the thread of a warpgroup.
    pub lane: usize,
    /// Its register.
    pub register: usize,
    /// The element's lowest bit in it.
    pub shift: u32,
}

impl Place {
    /// The element's bits.
    pub fn get<const R: usize>(self, registers: &[[u32; R]], bits: u32) -> u32 {
        registers[self.lane][self.register] >> self.shift & (u32::MAX >> (32 - bits))
    }

    /// Sets them.
    pub fn set<const R: usize>(self, registers: &mut [[u32; R]], bits: u32, value: u32) {
        let mask = u32::MAX >> (32 - bits) << self.shift;
        let register = &mut registers[self.lane][self.register];
        *register = *register & !mask | value << self.shift & mask;
    }
}

/// An element of a; rows from 16 on are those of the warpgroup's further warps.
pub fn a(row: usize, k: usize, bits: u32) -> Place {
    let each = 32 / bits as usize;
    let (warp, row) = (row / 16, row % 16);
    Place {
        lane: 32 * warp + 4 * (row % 8) + k % (4 * each) / each,
        register: row / 8 + 2 * (k / (4 * each)),
        shift: bits * (k % each) as u32,
    }
}

/// An element of b.
pub fn b(k: usize, column: usize, bits: u32) -> Place {
    let each = 32 / bits as usize;
    Place {
        lane: 4 * column + k % (4 * each) / each,
        register: k / (4 * each),
        shift: bits * (k % each) as u32,
    }
}

/// An element of c or d; rows from 16 and columns from 8 on are those of `wgmma`. Two elements of 16 bits share a
/// register.
pub fn d(row: usize, column: usize, bits: u32) -> Place {
    let each = 32 / bits as usize;
    let (warp, row) = (row / 16, row % 16);
    let index = 4 * (column / 8) + 2 * (row / 8) + column % 2;
    Place {
        lane: 32 * warp + 4 * (row % 8) + column % 8 / 2,
        register: index / each,
        shift: bits * (index % each) as u32,
    }
}

/// `ldmatrix`: the registers of all lanes from the rows of all matrices, eight to a matrix.
pub fn load_matrices(rows: &[[u32; 4]], transpose: Transpose) -> [[u32; 4]; 32] {
    let mut registers = [[0; 4]; 32];
    for (row, words) in rows.iter().enumerate() {
        for column in 0..8 {
            let bits = words[column / 2] >> (16 * (column % 2)) & 0xffff;
            matrix_element(row, column, transpose).set(&mut registers, 16, bits);
        }
    }
    registers
}

/// `stmatrix`: the rows of so many matrices from the registers of all lanes.
pub fn store_matrices(registers: &[[u32; 4]; 32], matrices: usize, transpose: Transpose) -> [[u32; 4]; 32] {
    let mut rows = [[0; 4]; 32];
    for (row, words) in rows.iter_mut().take(8 * matrices).enumerate() {
        for column in 0..8 {
            let bits = matrix_element(row, column, transpose).get(registers, 16);
            words[column / 2] |= bits << (16 * (column % 2));
        }
    }
    rows
}

/// An element of the matrices, whose rows are numbered through.
fn matrix_element(row: usize, column: usize, transpose: Transpose) -> Place {
    let (matrix, row) = (row / 8, row % 8);
    let (row, column) = match transpose {
        Transpose::No => (row, column),
        Transpose::Yes => (column, row),
    };
    Place { lane: 4 * row + column / 2, register: matrix, shift: 16 * (column % 2) as u32 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    /// Every element has a place of its own, and all places are taken.
    #[test]
    fn fragments_are_bijections() {
        for (bits, k) in [(8, 32), (16, 16), (32, 8)] {
            let places = |found: HashSet<(usize, usize, u32)>, lanes: usize, registers: usize| {
                assert_eq!(found.len(), lanes * registers * 32 / bits as usize);
                assert!(found.iter().all(|p| p.0 < lanes && p.1 < registers && p.2 % bits == 0 && p.2 < 32));
            };
            let key = |place: Place| (place.lane, place.register, place.shift);
            places((0..64 * k).map(|i| key(a(i / k, i % k, bits))).collect(), 128, 4);
            places((0..8 * k).map(|i| key(b(i % k, i / k, bits))).collect(), 32, 2);
            if bits > 8 {
                places(
                    (0..64 * 256).map(|i| key(d(i / 256, i % 256, bits))).collect(),
                    128,
                    4 * bits as usize,
                );
            }
        }
    }

    /// The tables of the PTX manual, row by row.
    #[test]
    fn fragments_are_those_of_ptx() {
        for lane in 0..32 {
            let (g, t) = (lane / 4, lane % 4);
            let at = |register, shift| Place { lane, register, shift };
            assert_eq!(a(g, 2 * t, 16), at(0, 0));
            assert_eq!(a(g + 8, 2 * t + 1, 16), at(1, 16));
            assert_eq!(a(g, 2 * t + 9, 16), at(2, 16));
            assert_eq!(a(g + 8, 2 * t + 8, 16), at(3, 0));
            assert_eq!(b(2 * t + 1, g, 16), at(0, 16));
            assert_eq!(b(2 * t + 8, g, 16), at(1, 0));
            assert_eq!(a(g, t, 32), at(0, 0));
            assert_eq!(a(g + 8, t + 4, 32), at(3, 0));
            assert_eq!(b(t + 4, g, 32), at(1, 0));
            assert_eq!(a(g + 8, 4 * t + 3, 8), at(1, 24));
            assert_eq!(a(g, 4 * t + 18, 8), at(2, 16));
            assert_eq!(b(4 * t + 17, g, 8), at(1, 8));
            assert_eq!(d(g, 2 * t + 1, 32), at(1, 0));
            assert_eq!(d(g + 8, 2 * t, 32), at(2, 0));
            assert_eq!(d(g + 8, 2 * t + 1, 16), at(1, 16));
            let warp3 = Place { lane: 96 + lane, register: 4 * 5 + 3, shift: 0 };
            assert_eq!(d(48 + g + 8, 8 * 5 + 2 * t + 1, 32), warp3);
            assert_eq!(a(48 + g + 8, 2 * t, 16), Place { lane: 96 + lane, register: 1, shift: 0 });
        }
    }

    #[test]
    fn matrices_come_back_and_transpose() {
        let rows: [[u32; 4]; 32] = core::array::from_fn(|row| {
            core::array::from_fn(|i| (row * 0x1000 + 2 * i + ((2 * i + 1) << 16)) as u32)
        });
        let element = |rows: &[[u32; 4]; 32], row: usize, column: usize| {
            rows[row][column / 2] >> (16 * (column % 2)) & 0xffff
        };
        for matrices in [1, 2, 4] {
            for transpose in [Transpose::No, Transpose::Yes] {
                let registers = load_matrices(&rows[..8 * matrices], transpose);
                assert_eq!(
                    store_matrices(&registers, matrices, transpose)[..8 * matrices],
                    rows[..8 * matrices]
                );
                let other = if transpose == Transpose::No { Transpose::Yes } else { Transpose::No };
                let turned = store_matrices(&registers, matrices, other);
                for row in 0..8 * matrices {
                    for column in 0..8 {
                        let mirror = element(&rows, row / 8 * 8 + column, row % 8);
                        assert_eq!(element(&turned, row, column), mirror);
                    }
                }
            }
        }
        // Register m of lane l: row l / 4, columns 2 (l % 4) and the next.
        assert_eq!(
            load_matrices(&rows, Transpose::No)[13][2],
            element(&rows, 19, 2) | element(&rows, 19, 3) << 16
        );
        assert_eq!(
            load_matrices(&rows, Transpose::Yes)[13][2],
            element(&rows, 18, 3) | element(&rows, 19, 3) << 16
        );
    }
}
