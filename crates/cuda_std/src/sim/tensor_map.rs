//! Tensor maps of the simulator: the rules of `cuTensorMapEncodeTiled`, and which bytes a box moves.

use std::vec::Vec;

use crate::tma::TensorMap;
use crate::wgmma::Swizzle;

/// Type of an element. 8-bit floating-point and signed types travel as [`U8`](Self::U8).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
#[allow(missing_docs)]
pub enum Element {
    U8 = 0,
    U16 = 1,
    U32 = 2,
    I32 = 3,
    U64 = 4,
    I64 = 5,
    F16 = 6,
    F32 = 7,
    F64 = 8,
    Bf16 = 9,
}

impl Element {
    const ALL: [Element; 10] = [
        Element::U8,
        Element::U16,
        Element::U32,
        Element::I32,
        Element::U64,
        Element::I64,
        Element::F16,
        Element::F32,
        Element::F64,
        Element::Bf16,
    ];

    /// Size in bytes.
    pub const fn bytes(self) -> u32 {
        match self {
            Element::U8 => 1,
            Element::U16 | Element::F16 | Element::Bf16 => 2,
            Element::U32 | Element::I32 | Element::F32 => 4,
            Element::U64 | Element::I64 | Element::F64 => 8,
        }
    }

    /// Whether it is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, Element::F16 | Element::F32 | Element::F64 | Element::Bf16)
    }
}

/// What is read outside the tensor.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Hash)]
pub enum Fill {
    /// Zeros.
    #[default]
    Zeros,
    /// A NaN.
    Nan,
}

/// What [`encode`] encodes. All lists begin with the innermost dimension.
#[derive(Clone, Copy, Debug)]
pub struct Tiled<'a> {
    /// Type of an element.
    pub element: Element,
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Extents in elements, one to five of them, each 1 to 2³².
    pub dims: &'a [u64],
    /// Strides in bytes of all dimensions but the innermost, which is dense: multiples of 16 under 2⁴⁰.
    pub strides_bytes: &'a [u64],
    /// Extents of the box in elements, each 1 to 256.
    pub box_dims: &'a [u32],
    /// Steps between the elements that a copy takes, each 1 to 8; the innermost does not count.
    pub element_strides: &'a [u32],
    /// Permutation in shared memory.
    pub swizzle: Swizzle,
    /// Fill outside the tensor.
    pub fill: Fill,
}

/// The rule that a map breaks.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum EncodeError {
    /// Too many or too few dimensions.
    #[error("a tensor map has 1 to 5 dimensions, got {0}")]
    Rank(usize),
    /// A list of the wrong length.
    #[error("{list} of a tensor map of rank {rank}: expected {expected} values, got {got}")]
    Length {
        /// Its name.
        list: &'static str,
        /// Dimensions.
        rank: usize,
        /// How many it should have.
        expected: usize,
        /// How many it has.
        got: usize,
    },
    /// The tensor is not aligned.
    #[error("address {0:#x} of a tensor map is not a multiple of 16")]
    Address(u64),
    /// An extent of the tensor.
    #[error("dims[{dimension}] of a tensor map is {value}: expected 1 to 2^32")]
    Dim {
        /// Which.
        dimension: usize,
        /// Its value.
        value: u64,
    },
    /// A stride.
    #[error("strides_bytes[{dimension}] of a tensor map is {value}: expected a multiple of 16 under 2^40")]
    Stride {
        /// Which.
        dimension: usize,
        /// Its value.
        value: u64,
    },
    /// An extent of the box.
    #[error("box_dims[{dimension}] of a tensor map is {value}: expected 1 to 256")]
    Box {
        /// Which.
        dimension: usize,
        /// Its value.
        value: u32,
    },
    /// The box's rows in bytes.
    #[error("the box's rows have {0} bytes: expected a multiple of 16")]
    RowBytes(u32),
    /// The box's rows are wider than the swizzle.
    #[error("the box's rows have {row_bytes} bytes, but {swizzle:?} permutes within {width}")]
    Swizzle {
        /// Bytes of a row.
        row_bytes: u32,
        /// The pattern.
        swizzle: Swizzle,
        /// Its width in bytes.
        width: u32,
    },
    /// The box's rows are narrower than the swizzle: the driver takes them, but nobody says where they lie.
    #[error(
        "the box's rows have {row_bytes} bytes, less than the width of {swizzle:?}: that is not simulated"
    )]
    NarrowRows {
        /// Bytes of a row.
        row_bytes: u32,
        /// The pattern.
        swizzle: Swizzle,
    },
    /// A step.
    #[error("element_strides[{dimension}] of a tensor map is {value}: expected 1 to 8")]
    ElementStride {
        /// Which.
        dimension: usize,
        /// Its value.
        value: u32,
    },
    /// NaN of an integer type.
    #[error("{0:?} has no NaN to fill with")]
    Fill(Element),
}

const MAGIC: u64 = 0x7266_6d61_7000;

/// Encodes a map as the simulator's instructions read it.
pub fn encode(tiled: &Tiled<'_>) -> Result<TensorMap, EncodeError> {
    let Tiled { element, address, dims, strides_bytes, box_dims, element_strides, swizzle, fill } = *tiled;
    let rank = dims.len();
    if !(1..=5).contains(&rank) {
        return Err(EncodeError::Rank(rank));
    }
    for (list, got, expected) in [
        ("strides_bytes", strides_bytes.len(), rank - 1),
        ("box_dims", box_dims.len(), rank),
        ("element_strides", element_strides.len(), rank),
    ] {
        if got != expected {
            return Err(EncodeError::Length { list, rank, expected, got });
        }
    }
    if !address.is_multiple_of(16) {
        return Err(EncodeError::Address(address));
    }
    if let Some(dimension) = dims.iter().position(|dim| !(1..=1 << 32).contains(dim)) {
        return Err(EncodeError::Dim { dimension, value: dims[dimension] });
    }
    let bad_stride = |stride: &u64| !stride.is_multiple_of(16) || *stride >= 1 << 40;
    if let Some(dimension) = strides_bytes.iter().position(bad_stride) {
        return Err(EncodeError::Stride { dimension, value: strides_bytes[dimension] });
    }
    if let Some(dimension) = box_dims.iter().position(|dim| !(1..=256).contains(dim)) {
        return Err(EncodeError::Box { dimension, value: box_dims[dimension] });
    }
    if let Some(dimension) = element_strides.iter().position(|step| !(1..=8).contains(step)) {
        return Err(EncodeError::ElementStride { dimension, value: element_strides[dimension] });
    }
    let row_bytes = box_dims[0] * element.bytes();
    if !row_bytes.is_multiple_of(16) {
        return Err(EncodeError::RowBytes(row_bytes));
    }
    let width = swizzle.bytes();
    if swizzle != Swizzle::None && row_bytes > width {
        return Err(EncodeError::Swizzle { row_bytes, swizzle, width });
    }
    if swizzle != Swizzle::None && row_bytes < width {
        return Err(EncodeError::NarrowRows { row_bytes, swizzle });
    }
    if fill == Fill::Nan && !element.is_float() {
        return Err(EncodeError::Fill(element));
    }
    let mut words = [0u64; 16];
    words[0] =
        MAGIC << 16 | element as u64 | (rank as u64) << 4 | (swizzle as u64) << 8 | (fill as u64) << 12;
    words[1] = address;
    for (i, dim) in dims.iter().enumerate() {
        words[2 + i] = *dim;
    }
    for (i, stride) in strides_bytes.iter().enumerate() {
        words[7 + i] = *stride;
    }
    for i in 0..rank {
        words[11 + i] = u64::from(box_dims[i]) | u64::from(element_strides[i]) << 32;
    }
    Ok(TensorMap(words))
}

/// A map that the simulator did not encode: the address is not one of a map, or its bytes were overwritten.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("these 128 bytes are not a tensor map")]
pub struct NotATensorMap;

/// A decoded map. Lists are filled up with ones and zeros beyond `rank`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Decoded {
    /// Type of an element.
    pub element: Element,
    /// Dimensions.
    pub rank: usize,
    /// Address of the first element.
    pub address: u64,
    /// Extents in elements.
    pub dims: [u64; 5],
    /// Strides in bytes of all dimensions.
    pub strides_bytes: [u64; 5],
    /// Elements that a copy takes in each dimension.
    pub counts: [u32; 5],
    /// Steps between them.
    pub steps: [u32; 5],
    /// Permutation in shared memory.
    pub swizzle: Swizzle,
    /// Fill outside the tensor.
    pub fill: Fill,
}

/// Bytes of a box that are contiguous in shared and in global memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Piece {
    /// Offset from the start of the box in shared memory.
    pub shared: u32,
    /// Offset from the map's address; `None` outside the tensor.
    pub global: Option<u64>,
    /// At most 16.
    pub bytes: u32,
}

impl Decoded {
    /// Reads a map.
    pub fn new(map: &TensorMap) -> Result<Self, NotATensorMap> {
        let words = &map.0;
        let field = |shift: u32| (words[0] >> shift) as usize & 15;
        let element = Element::ALL.get(field(0)).copied();
        let swizzles = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128];
        let swizzle = swizzles.get(field(8)).copied();
        let fill = [Fill::Zeros, Fill::Nan].get(field(12)).copied();
        let rank = field(4);
        let (true, Some(element), Some(swizzle), Some(fill), 1..=5) =
            (words[0] >> 16 == MAGIC, element, swizzle, fill, rank)
        else {
            return Err(NotATensorMap);
        };
        let mut decoded = Decoded {
            element,
            rank,
            address: words[1],
            dims: [1; 5],
            strides_bytes: [0; 5],
            counts: [1; 5],
            steps: [1; 5],
            swizzle,
            fill,
        };
        decoded.strides_bytes[0] = element.bytes().into();
        for i in 0..rank {
            decoded.dims[i] = words[2 + i];
            let (box_dim, step) = (words[11 + i] as u32, (words[11 + i] >> 32) as u32);
            if i == 0 {
                decoded.counts[0] = box_dim;
            } else {
                decoded.strides_bytes[i] = words[6 + i];
                decoded.steps[i] = step;
                decoded.counts[i] = box_dim.div_ceil(step);
            }
        }
        Ok(decoded)
    }

    /// Bytes that a copy takes, those outside the tensor included.
    pub fn box_bytes(&self) -> u32 {
        self.counts.iter().product::<u32>() * self.element.bytes()
    }

    /// 16 bytes of the fill value.
    pub fn fill_bytes(&self) -> [u8; 16] {
        // Ones but for the sign, as tensor cores write a NaN.
        let nan: &[u8] = match self.element.bytes() {
            2 => &[0xff, 0x7f],
            4 => &[0xff, 0xff, 0xff, 0x7f],
            _ => &[0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0x7f],
        };
        match self.fill {
            Fill::Zeros => [0; 16],
            Fill::Nan => core::array::from_fn(|i| nan[i % nan.len()]),
        }
    }

    /// The box at `coordinates`, of which there are `rank`: innermost first, row by row.
    ///
    /// Rows follow one another without gaps; the swizzle permutes addresses, so the box starts at a multiple of its
    /// repeat.
    pub fn pieces(&self, coordinates: &[i32]) -> Vec<Piece> {
        let element_bytes = self.element.bytes();
        let row_bytes = self.counts[0] * element_bytes;
        let rows = self.counts[1..].iter().product::<u32>();
        let first = i64::from(coordinates[0]) * i64::from(element_bytes);
        let inside = 0..self.dims[0] as i64 * i64::from(element_bytes);
        let mut pieces = Vec::with_capacity((rows * row_bytes / 16) as usize);
        for row in 0..rows {
            let row_offset = self.row(row, coordinates);
            let mut column = 0;
            while column < row_bytes {
                let byte = first + i64::from(column);
                // To the end of 16 bytes in shared memory, or to an edge of the tensor.
                let mut bytes = 16 - column % 16;
                for edge in [inside.start, inside.end] {
                    if (1..i64::from(bytes)).contains(&(edge - byte)) {
                        bytes = (edge - byte) as u32;
                    }
                }
                let global = row_offset.filter(|_| inside.contains(&byte)).map(|offset| offset + byte as u64);
                let shared = self.swizzle.apply(row * row_bytes + column);
                pieces.push(Piece { shared, global, bytes });
                column += bytes;
            }
        }
        pieces
    }

    /// Where a row of the box begins in the tensor, at its first element; `None` outside.
    fn row(&self, mut row: u32, coordinates: &[i32]) -> Option<u64> {
        let mut offset = 0;
        for (i, &coordinate) in coordinates.iter().enumerate().skip(1) {
            let step = i64::from(row % self.counts[i] * self.steps[i]);
            row /= self.counts[i];
            let index = u64::try_from(i64::from(coordinate) + step).ok()?;
            if index >= self.dims[i] {
                return None;
            }
            offset += index * self.strides_bytes[i];
        }
        Some(offset)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::string::ToString;
    use std::vec;

    const MATRIX: Tiled<'static> = Tiled {
        element: Element::Bf16,
        address: 0x100,
        dims: &[100, 30],
        strides_bytes: &[208],
        box_dims: &[64, 8],
        element_strides: &[1, 1],
        swizzle: Swizzle::Bytes128,
        fill: Fill::Zeros,
    };

    #[test]
    fn maps_come_back() {
        let map = encode(&MATRIX).expect("a map");
        let decoded = Decoded::new(&map).expect("a map");
        assert_eq!((decoded.element, decoded.rank, decoded.address), (Element::Bf16, 2, 0x100));
        assert_eq!(decoded.dims, [100, 30, 1, 1, 1]);
        assert_eq!(decoded.strides_bytes, [2, 208, 0, 0, 0]);
        assert_eq!(decoded.counts, [64, 8, 1, 1, 1]);
        assert_eq!((decoded.swizzle, decoded.fill), (Swizzle::Bytes128, Fill::Zeros));
        assert_eq!(decoded.box_bytes(), 1024);
        let steps = Tiled {
            dims: &[1 << 32, 9, 8, 7, 6],
            strides_bytes: &[16, 32, 48, (1 << 40) - 16],
            box_dims: &[64, 7, 256, 1, 3],
            element_strides: &[1, 2, 8, 1, 3],
            fill: Fill::Nan,
            ..MATRIX
        };
        let decoded = encode(&steps).map(|map| Decoded::new(&map).expect("a map")).expect("a map");
        assert_eq!((decoded.dims, decoded.counts), ([1 << 32, 9, 8, 7, 6], [64, 4, 32, 1, 1]));
        assert_eq!(decoded.fill_bytes()[..4], [0xff, 0x7f, 0xff, 0x7f]);
        assert_eq!(Decoded::new(&TensorMap([0; 16])), Err(NotATensorMap));
        assert_eq!(NotATensorMap.to_string(), "these 128 bytes are not a tensor map");
    }

    #[test]
    fn every_rule_has_its_message() {
        let text = |tiled: Tiled<'_>| encode(&tiled).unwrap_err().to_string();
        for (tiled, expected) in [
            (Tiled { dims: &[], ..MATRIX }, "a tensor map has 1 to 5 dimensions, got 0"),
            (Tiled { dims: &[1; 6], ..MATRIX }, "a tensor map has 1 to 5 dimensions, got 6"),
            (
                Tiled { strides_bytes: &[], ..MATRIX },
                "strides_bytes of a tensor map of rank 2: expected 1 values, got 0",
            ),
            (
                Tiled { box_dims: &[8; 3], ..MATRIX },
                "box_dims of a tensor map of rank 2: expected 2 values, got 3",
            ),
            (
                Tiled { element_strides: &[1], ..MATRIX },
                "element_strides of a tensor map of rank 2: expected 2 values, got 1",
            ),
            (Tiled { address: 0x108, ..MATRIX }, "address 0x108 of a tensor map is not a multiple of 16"),
            (Tiled { dims: &[100, 0], ..MATRIX }, "dims[1] of a tensor map is 0: expected 1 to 2^32"),
            (
                Tiled { dims: &[(1 << 32) + 1, 1], ..MATRIX },
                "dims[0] of a tensor map is 4294967297: expected 1 to 2^32",
            ),
            (
                Tiled { strides_bytes: &[200], ..MATRIX },
                "strides_bytes[0] of a tensor map is 200: expected a multiple of 16 under 2^40",
            ),
            (
                Tiled { strides_bytes: &[1 << 40], ..MATRIX },
                "strides_bytes[0] of a tensor map is 1099511627776: expected a multiple of 16 under 2^40",
            ),
            (
                Tiled { box_dims: &[64, 257], ..MATRIX },
                "box_dims[1] of a tensor map is 257: expected 1 to 256",
            ),
            (Tiled { box_dims: &[0, 8], ..MATRIX }, "box_dims[0] of a tensor map is 0: expected 1 to 256"),
            (
                Tiled { box_dims: &[60, 8], ..MATRIX },
                "the box's rows have 120 bytes: expected a multiple of 16",
            ),
            (
                Tiled { box_dims: &[72, 8], ..MATRIX },
                "the box's rows have 144 bytes, but Bytes128 permutes within 128",
            ),
            (
                Tiled { box_dims: &[32, 8], ..MATRIX },
                "the box's rows have 64 bytes, less than the width of Bytes128: that is not simulated",
            ),
            (
                Tiled { element_strides: &[1, 9], ..MATRIX },
                "element_strides[1] of a tensor map is 9: expected 1 to 8",
            ),
            (Tiled { element: Element::U16, fill: Fill::Nan, ..MATRIX }, "U16 has no NaN to fill with"),
        ] {
            assert_eq!(text(tiled), expected);
        }
    }

    /// The box element by element: offset in shared memory of each, and where it comes from.
    fn elements(map: &Decoded, coordinates: &[i32]) -> Vec<(u32, Option<u64>)> {
        let bytes = map.element.bytes();
        let mut found = vec![];
        let total: u32 = map.counts.iter().product();
        for linear in 0..total {
            let mut rest = linear;
            let mut global = Some(0);
            for i in 0..5 {
                let index = rest % map.counts[i] * map.steps[i];
                rest /= map.counts[i];
                let at = i64::from(coordinates.get(i).copied().unwrap_or(0)) + i64::from(index);
                global = global.filter(|_| at >= 0 && (at as u64) < map.dims[i]);
                global = global.map(|offset: u64| offset + at as u64 * map.strides_bytes[i]);
            }
            found.push((map.swizzle.apply(linear * bytes), global));
        }
        found
    }

    proptest! {
        #![proptest_config(testkit::gpu::proptest_config(500))]

        #[test]
        fn pieces_are_the_box(
            (element, swizzle) in (0usize..10, 0usize..4),
            (dims, box_dims) in (prop::collection::vec(1u64..40, 1..=5), prop::collection::vec(1u32..6, 5)),
            (steps, coordinates) in (prop::collection::vec(1u32..4, 5), prop::collection::vec(-20i32..45, 5)),
            inner in 1u32..8,
        ) {
            let rank = dims.len();
            let element = Element::ALL[element];
            let swizzle = [Swizzle::None, Swizzle::Bytes32, Swizzle::Bytes64, Swizzle::Bytes128][swizzle];
            let mut box_dims = box_dims[..rank].to_vec();
            let row_bytes = if swizzle == Swizzle::None { 16 * inner } else { swizzle.bytes() };
            box_dims[0] = row_bytes / element.bytes();
            let strides: Vec<u64> = (1..rank as u64).map(|i| 16 * i * 1000).collect();
            let tiled = Tiled { element, address: 0, dims: &dims, strides_bytes: &strides, box_dims: &box_dims,
                element_strides: &steps[..rank], swizzle, fill: Fill::Zeros };
            let map = Decoded::new(&encode(&tiled).expect("a map")).expect("a map");
            let pieces = map.pieces(&coordinates[..rank]);
            let bytes = element.bytes();
            let split: Vec<(u32, Option<u64>)> = pieces
                .iter()
                .flat_map(|piece| (0..piece.bytes / bytes).map(move |i| {
                    (piece.shared + i * bytes, piece.global.map(|offset| offset + u64::from(i * bytes)))
                }))
                .collect();
            prop_assert_eq!(split, elements(&map, &coordinates[..rank]));
            prop_assert_eq!(pieces.iter().map(|piece| piece.bytes).sum::<u32>(), map.box_bytes());
            prop_assert!(pieces.iter().all(|piece| piece.shared / 16 == (piece.shared + piece.bytes - 1) / 16));
        }
    }
}
