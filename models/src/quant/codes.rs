//! How codes lie in a file.

/// Codes of a matrix `[n, k]` in a tensor of their own. 32-bit words are little-endian, and hold their fields lowest
/// first unless said otherwise.
#[derive(Clone, Debug)]
pub(crate) enum Codes<'a> {
    /// A byte for each, row after row, in which the bits of `flip` are inverted.
    Bytes { data: &'a [u8], flip: u8 },
    /// Rows of `stride` bytes, each a stream of `bits` for each code, lowest bit first.
    Stream { data: &'a [u8], bits: u32, stride: usize },
    /// Words along k, of which the file has `[k · bits / 32, n]`; `bits` divide a word.
    WordsAlongK { data: &'a [u8], bits: u32, n: usize },
    /// Words of eight rows, `[k, n / 8]`, in AWQ's order.
    AwqWords { data: &'a [u8], n: usize },
}

/// Shift of the field of each of eight columns in a word of AWQ.
const AWQ_SHIFTS: [u32; 8] = [0, 16, 4, 20, 8, 24, 12, 28];

/// A little-endian word of a tensor.
pub(super) fn word(data: &[u8], index: usize) -> u32 {
    let bytes = &data[4 * index..4 * index + 4];
    u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])
}

/// The field of column `col` in the words of AWQ that are a row of a matrix.
pub(super) fn awq_field(data: &[u8], first_word: usize, col: usize) -> u8 {
    (word(data, first_word + col / 8) >> AWQ_SHIFTS[col % 8] & 15) as u8
}

impl Codes<'_> {
    /// The codes of a row of the file.
    pub(super) fn row(&self, row: usize, out: &mut [u8]) {
        let k = out.len();
        match *self {
            Codes::Bytes { data, flip } => {
                for (out, byte) in out.iter_mut().zip(&data[row * k..(row + 1) * k]) {
                    *out = byte ^ flip;
                }
            }
            Codes::Stream { data, bits: 4, stride } => {
                let bytes = &data[row * stride..(row + 1) * stride];
                for (pair, byte) in out.chunks_mut(2).zip(bytes) {
                    pair[0] = byte & 15;
                    if let Some(second) = pair.get_mut(1) {
                        *second = byte >> 4;
                    }
                }
            }
            Codes::Stream { data, bits, stride } => {
                let bytes = &data[row * stride..(row + 1) * stride];
                for (col, out) in out.iter_mut().enumerate() {
                    let bit = col * bits as usize;
                    // A code of at most eight bits is in at most two bytes.
                    let next = bytes.get(bit / 8 + 1).copied().unwrap_or(0);
                    let pair = u16::from_le_bytes([bytes[bit / 8], next]);
                    *out = (pair >> (bit % 8) & ((1 << bits) - 1)) as u8;
                }
            }
            Codes::WordsAlongK { data, bits, n } => {
                let mask = (1u32 << bits) - 1;
                for (index, fields) in out.chunks_mut((32 / bits) as usize).enumerate() {
                    let mut word = word(data, index * n + row);
                    for out in fields {
                        *out = (word & mask) as u8;
                        word >>= bits;
                    }
                }
            }
            Codes::AwqWords { data, n } => {
                for (col, out) in out.iter_mut().enumerate() {
                    *out = awq_field(data, col * (n / 8), row);
                }
            }
        }
    }
}
