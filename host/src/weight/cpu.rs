//! Packed weights on the CPU: products of few rows from the codes as they lie, and rows of tiles as f32.
//!
//! The columns of a tile stay in the order in which a vector of codes has them; what they are multiplied by is put into
//! that order once.

use std::array;
use std::ops::Range;
use std::sync::LazyLock;

use abi::weight::{BLOCK_SCALES, Codes, SUPER_K, ScaleType, TILE_K, TILE_ROWS, e6m9_to_f32};
use half::f16;

use super::{Counts, Weight};
use crate::fp8::F8E4M3;
use crate::simd::{LANES, Lanes, Work, by_best, load};
use crate::tensor::{FloatElement, Tensor};

/// Rows of a row of tiles.
pub(crate) const ROWS: usize = TILE_ROWS as usize;

/// A packed weight's bytes in host memory.
pub(crate) struct Packed<'a> {
    weight: &'a Weight,
    counts: Counts,
    codes: &'a [u8],
    scales: &'a [u8],
    zeros: &'a [u8],
    minimums: &'a [u8],
    supers: &'a [u8],
    super_minimums: &'a [u8],
}

/// The value of an fp4.
pub(crate) fn e2m1(code: u8) -> f32 {
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let value = VALUES[usize::from(code & 7)];
    if code & 8 == 0 { value } else { -value }
}

fn e4m3(code: u8) -> f32 {
    static VALUES: LazyLock<[f32; 256]> =
        LazyLock::new(|| std::array::from_fn(|code| F8E4M3(code as u8).to_f32()));
    VALUES[usize::from(code)]
}

/// The value of a scale's bits; `factor` is its super or global scale.
pub(crate) fn number(kind: ScaleType, bytes: &[u8], factor: f32) -> f32 {
    match kind {
        ScaleType::F32 => f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]),
        ScaleType::F16 => f16::from_le_bytes([bytes[0], bytes[1]]).to_f32(),
        ScaleType::Bf16 => f32::from_bits(u32::from(u16::from_le_bytes([bytes[0], bytes[1]])) << 16),
        ScaleType::E8m0 => f32::from_bits(match bytes[0] {
            0 => 0x0040_0000,
            0xff => 0x7fc0_0000,
            exponent => u32::from(exponent) << 23,
        }),
        ScaleType::E4m3 => e4m3(bytes[0]) * factor,
        ScaleType::U8Super => f32::from(bytes[0]) * factor,
        ScaleType::I8Super => f32::from(bytes[0] as i8) * factor,
    }
}

impl<'a> Packed<'a> {
    /// Of a weight in host memory.
    pub(crate) fn new(weight: &'a Weight) -> Self {
        let bytes = |tensor: &'a Tensor| bytemuck::cast_slice(tensor.host_slice::<i8>());
        let optional = |tensor: &'a Option<Tensor>| tensor.as_ref().map_or(&[][..], bytes);
        Packed {
            weight,
            counts: weight.counts(),
            codes: bytes(&weight.codes),
            scales: bytes(&weight.scales),
            zeros: optional(&weight.zeros),
            minimums: optional(&weight.minimums),
            supers: optional(&weight.supers),
            super_minimums: optional(&weight.super_minimums),
        }
    }

    /// Numbers of a row of a as [`Packed::order`] leaves it.
    pub(crate) fn ordered_len(&self) -> usize {
        self.counts.tiles * self.vectors() * LANES
    }

    /// Vectors of a tile of such a row: its elements, and where there are minimums what they are multiplied by.
    #[inline(always)]
    fn vectors(&self) -> usize {
        if self.weight.layout.minimums { 6 } else { 4 }
    }

    /// For each place of a tile's columns as they are decoded, which column it is.
    pub(crate) fn places(&self) -> &'static [u8; TILE] {
        match self.weight.layout.codes.bits() {
            4 => &const { places_of_nibbles() },
            8 => &const { places_of_bytes() },
            _ => &const { places_of_halves() },
        }
    }

    /// Columns of the tiles.
    pub(crate) fn columns(&self) -> usize {
        self.counts.tiles * TILE
    }

    /// A row of a in the order of the codes, as [`Packed::few_rows`] wants it.
    pub(crate) fn order<T: FloatElement>(&self, row: &[T], ordered: &mut [[f32; LANES]]) {
        by_best(Order { row, places: self.places(), vectors: self.vectors(), ordered });
    }

    /// The products of a row of tiles, 16 columns of the result, and rows of a.
    pub(crate) fn few_rows(
        &self,
        expert: usize,
        block: usize,
        rows: &[[f32; LANES]],
        sums: &mut [[f32; ROWS]],
    ) {
        by_best(FewRows { packed: self, expert, block, rows, sums });
    }

    /// The values of a row of tiles in the order of [`Packed::places`], [`ROWS`] rows at a stride, of columns from the
    /// first tile to the last, of which those beyond k are not the matrix's.
    #[inline(always)]
    pub(crate) fn row_block<V: Lanes>(
        &self,
        (expert, block): (usize, usize),
        columns: Range<usize>,
        (values, stride): (&mut [f32], usize),
    ) {
        let tiles = columns.start / TILE..columns.end.div_ceil(TILE);
        self.for_tiles::<V>(expert, block, tiles.clone(), &mut Values { first: tiles.start, values, stride });
    }

    /// Columns of a row from `first` on, a multiple of a tile's, as many as there is room for.
    pub(crate) fn row(&self, row: usize, first: usize, values: &mut [f32]) {
        by_best(OneRow { packed: self, row, first, values });
    }

    /// Gives each row of these tiles to `user`.
    #[inline(always)]
    fn for_tiles<V: Lanes>(
        &self,
        expert: usize,
        block: usize,
        tiles: Range<usize>,
        user: &mut impl Decoded<V>,
    ) {
        let layout = self.weight.layout;
        // What the inner loop does not have to ask.
        let is_plain = self.counts.per_stretch == 1 && !layout.minimums;
        match (layout.codes, is_plain) {
            (Codes::Int4, true) => self.for_tiles_of::<V, INT4, true>(expert, block, tiles, user),
            (Codes::Int4, false) => self.for_tiles_of::<V, INT4, false>(expert, block, tiles, user),
            (Codes::Int8, true) => self.for_tiles_of::<V, INT8, true>(expert, block, tiles, user),
            (Codes::Int8, false) => self.for_tiles_of::<V, INT8, false>(expert, block, tiles, user),
            (Codes::E2m1, true) => self.for_tiles_of::<V, E2M1, true>(expert, block, tiles, user),
            (Codes::E2m1, false) => self.for_tiles_of::<V, E2M1, false>(expert, block, tiles, user),
            (Codes::E4m3, true) => self.for_tiles_of::<V, E4M3, true>(expert, block, tiles, user),
            (Codes::E4m3, false) => self.for_tiles_of::<V, E4M3, false>(expert, block, tiles, user),
            // They have one scale for a row.
            (Codes::E6m9, _) => self.for_tiles_of::<V, E6M9, true>(expert, block, tiles, user),
        }
    }

    /// The same of these codes. `PLAIN`: one scale for a row of a tile, and no minimums.
    #[inline(always)]
    fn for_tiles_of<V: Lanes, const CODES: u8, const PLAIN: bool>(
        &self,
        expert: usize,
        block: usize,
        tiles: Range<usize>,
        user: &mut impl Decoded<V>,
    ) {
        let layout = self.weight.layout;
        let block_of_all = expert * self.counts.row_blocks + block;
        let tile_bytes = layout.codes.tile_bytes() as usize;
        let is_narrow = !PLAIN && self.counts.per_stretch > 1;
        let zeros_differ = layout.zeros && is_narrow;
        let mut nibbles = [0.0; LANES];
        for (code, value) in nibbles.iter_mut().enumerate() {
            *value = if CODES == E2M1 { e2m1(code as u8) } else { code as f32 };
        }
        let nibbles = V::load(&nibbles);
        let mut levels = Levels {
            scales: [[0.0; STEPS]; ROWS],
            minimums: [[0.0; STEPS]; ROWS],
            zeros: [[0.0; STEPS]; ROWS],
        };
        let mut known = usize::MAX;
        for tile in tiles {
            let codes = &self.codes[(block_of_all * self.counts.tiles + tile) * tile_bytes..][..tile_bytes];
            // The CPU does not do so by itself in time: much is done with each line.
            let ahead = (block_of_all * self.counts.tiles + tile) * tile_bytes + AHEAD;
            let ahead = self.codes.get(ahead..).unwrap_or_default();
            // Groups of several tiles have theirs from the first.
            let stretch = self.stretch(tile);
            if stretch != known {
                known = stretch;
                self.read_levels::<V>((expert, block_of_all), (tile, stretch), &mut levels);
            }
            for row in 0..ROWS / 2 {
                for line in (0..tile_bytes / 8).step_by(64) {
                    V::prefetch(ahead.get(row * tile_bytes / 8 + line..).unwrap_or_default());
                }
                // Of 4 bits two rows have a piece together.
                let (pieces, _) = codes.as_chunks::<64>();
                for lower in 0..2 {
                    let place = 2 * row + lower;
                    let codes = &pieces[if CODES < INT8 { row } else { row + lower * (ROWS / 2) }];
                    let zero = V::splat(levels.zeros[place][0]);
                    let mut decoded = [zero; 4];
                    match CODES {
                        INT4 | E2M1 => {
                            let is_plain = CODES == E2M1 || zeros_differ;
                            let table = if is_plain { nibbles } else { nibbles.sub(zero) };
                            let words = V::words(codes);
                            for i in 0..4 {
                                decoded[i] = V::look_up(words, FIELDS[i] + lower as u32, table);
                            }
                        }
                        INT8 => {
                            let (codes, _) = codes.as_chunks();
                            for i in 0..4 {
                                decoded[i] = V::load_bytes(&codes[i]);
                                if !zeros_differ {
                                    decoded[i] = decoded[i].sub(zero);
                                }
                            }
                        }
                        E4M3 => {
                            let (codes, _) = codes.as_chunks();
                            for i in 0..4 {
                                decoded[i] = V::load_e4m3(&codes[i]);
                            }
                        }
                        _ => {
                            // Two lines of a row, of two steps each.
                            let line = |line: usize| &pieces[(2 * lower + line) * (ROWS / 2) + row];
                            for (i, decoded) in decoded.iter_mut().enumerate() {
                                let halves = words_of(&line(i / 2)[i % 2 * 32..]);
                                *decoded = V::load(&halves.map(e6m9_to_f32));
                            }
                        }
                    }
                    let kind = (is_narrow, if CODES < INT8 { 4 } else { 8 });
                    if zeros_differ {
                        let zeros = levels_as_lanes::<V>(&levels.zeros[place], kind);
                        for value in &mut decoded {
                            *value = value.sub(zeros);
                        }
                    }
                    let scales = levels_as_lanes(&levels.scales[place], kind);
                    let minimums = levels_as_lanes(&levels.minimums[place], kind);
                    let level = LevelLanes { scales, minimums, has_minimums: !PLAIN && layout.minimums };
                    user.row(tile, row + lower * (ROWS / 2), decoded, level);
                }
            }
        }
    }

    /// Where the scales of a tile begin, in stretches.
    #[inline(always)]
    fn stretch(&self, tile: usize) -> usize {
        let group = self.weight.layout.group as usize;
        if group != 0 && group <= TILE { tile } else { (tile * TILE).checked_div(group).unwrap_or(0) }
    }

    /// What the codes of a stretch's rows become values by.
    #[inline(always)]
    fn read_levels<V: Lanes>(
        &self,
        (expert, block_of_all): (usize, usize),
        (tile, stretch): (usize, usize),
        levels: &mut Levels,
    ) {
        let Counts { stretches, per_stretch, supers, .. } = self.counts;
        let layout = &self.weight.layout;
        let kind = layout.stored_scale();
        let bytes = kind.bytes() as usize;
        let global = self.weight.globals[expert];
        if layout.rows > 1 {
            let index = block_of_all / (layout.rows as usize / ROWS) * stretches + stretch;
            let of_block = &self.scales[index * BLOCK_SCALES as usize * bytes..];
            // Of the even rows, and behind those of the odd ones.
            let scales = [number(kind, of_block, global), number(kind, &of_block[2 * bytes..], global)];
            levels.scales = array::from_fn(|place| [scales[place / 2 % 2]; STEPS]);
            levels.zeros = [[f32::from(layout.zero()); STEPS]; ROWS];
            return;
        }
        let first = (block_of_all * stretches + stretch) * ROWS * per_stretch;
        let first_super = (block_of_all * supers + tile / (SUPER_K / TILE_K) as usize) * ROWS;
        let parts = [(self.scales, self.supers), (self.minimums, self.super_minimums)];
        for (part, (of, supers)) in parts.into_iter().enumerate().take(1 + usize::from(layout.minimums)) {
            let mut factors = [1.0; ROWS];
            if kind.has_supers() {
                V::load_f16(&words_of(&supers[2 * first_super..])).store(&mut factors);
            } else if kind == ScaleType::E4m3 {
                factors = [global; ROWS];
            }
            let mut numbers = [[0.0; LANES]; STEPS];
            for i in 0..per_stretch.min(STEPS) {
                let of = &of[(first + i * LANES) * bytes..][..LANES * bytes];
                read_numbers::<V>(kind, of, &mut numbers[i]);
            }
            let numbers = numbers.as_flattened();
            let to = if part == 0 { &mut levels.scales } else { &mut levels.minimums };
            for place in 0..ROWS {
                for step in 0..STEPS {
                    to[place][step] =
                        numbers[place * per_stretch + step * per_stretch / STEPS] * factors[place];
                }
            }
        }
        for place in 0..ROWS {
            for step in 0..STEPS {
                levels.zeros[place][step] = f32::from(if layout.zeros {
                    self.zeros[first + place * per_stretch + step * per_stretch / STEPS]
                } else {
                    layout.zero()
                });
            }
        }
    }
}

/// Bytes of codes from those that are multiplied to those that are fetched.
const AHEAD: usize = 3072;

/// [`Codes`] as parameters; those of four bits are below those of more.
const INT4: u8 = 0;
const E2M1: u8 = 1;
const INT8: u8 = 2;
const E4M3: u8 = 3;
const E6M9: u8 = 4;

/// Columns of a tile, and its steps of 16.
const TILE: usize = TILE_K as usize;
const STEPS: usize = TILE / 16;

/// A value is `(code − zero) · scale − minimum`, by the row's place among the scales and the step.
struct Levels {
    scales: [[f32; STEPS]; ROWS],
    minimums: [[f32; STEPS]; ROWS],
    zeros: [[f32; STEPS]; ROWS],
}

/// The scales and minimums of a row of a tile, the same for each of its vectors.
#[derive(Clone, Copy)]
struct LevelLanes<V> {
    scales: V,
    minimums: V,
    has_minimums: bool,
}

/// A row's levels for each of its vectors.
#[inline(always)]
fn levels_as_lanes<V: Lanes>(of: &[f32; STEPS], (is_narrow, bits): (bool, u32)) -> V {
    let [a, b, c, d] = *of;
    match (is_narrow, bits) {
        (false, _) => V::splat(a),
        (true, 4) => V::load(&[a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d]),
        (true, _) => V::load(&[a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d]),
    }
}

/// What is done with the rows of tiles.
trait Decoded<V> {
    /// Takes the codes of a row of a tile, less their zero points, in the order of [`Packed::places`].
    fn row(&mut self, tile: usize, row: usize, decoded: [V; 4], level: LevelLanes<V>);
}

/// Rows of tiles from `first` on, one after the other.
struct Values<'s> {
    first: usize,
    values: &'s mut [f32],
    stride: usize,
}

impl<V: Lanes> Decoded<V> for Values<'_> {
    #[inline(always)]
    fn row(&mut self, tile: usize, row: usize, decoded: [V; 4], level: LevelLanes<V>) {
        let to = &mut self.values[row * self.stride + (tile - self.first) * TILE..][..TILE];
        let (to, _) = to.as_chunks_mut::<LANES>();
        for i in 0..4 {
            let mut value = decoded[i].mul(level.scales);
            if level.has_minimums {
                value = value.sub(level.minimums);
            }
            value.store(&mut to[i]);
        }
    }
}

/// The fields of a word that the vectors of its upper row are; those of the lower row come behind each.
const FIELDS: [u32; 4] = [0, 4, 2, 6];

/// Columns in the order in which fields of words come: [`Codes::place`].
const fn places_of_nibbles() -> [u8; TILE] {
    let mut places = [0; TILE];
    let mut i = 0;
    while i < TILE {
        let (vector, word) = (i / LANES, i % LANES);
        places[i] = (word % STEPS * 16 + word / STEPS * 4 + vector) as u8;
        i += 1;
    }
    places
}

/// Columns in the order of a row's bytes: [`abi::weight::byte_place`].
const fn places_of_bytes() -> [u8; TILE] {
    let mut places = [0; TILE];
    let mut i = 0;
    while i < TILE {
        let (lane, step) = (i / 16, i % 16 / 4);
        places[i] = (step * 16 + lane * 4 + i % 4) as u8;
        i += 1;
    }
    places
}

/// Columns in the order of a row's two lines of 16-bit codes: [`Codes::place`].
const fn places_of_halves() -> [u8; TILE] {
    let mut places = [0; TILE];
    let mut i = 0;
    while i < TILE {
        let (line, lane, step) = (i / 32, i % 32 / 8, i % 8 / 4);
        places[i] = ((2 * line + step) * 16 + lane * 4 + i % 4) as u8;
        i += 1;
    }
    places
}

/// The first sixteen numbers of 16 bits of these bytes.
#[inline(always)]
fn words_of(bytes: &[u8]) -> [u16; LANES] {
    std::array::from_fn(|i| u16::from_le_bytes([bytes[2 * i], bytes[2 * i + 1]]))
}

/// Sixteen scales without their factors.
#[inline(always)]
fn read_numbers<V: Lanes>(kind: ScaleType, bytes: &[u8], numbers: &mut [f32; LANES]) {
    let of_bytes = |bytes: &[u8]| -> [u8; LANES] { std::array::from_fn(|i| bytes[i]) };
    match kind {
        ScaleType::F32 => {
            for (number, bytes) in numbers.iter_mut().zip(bytes.as_chunks().0) {
                *number = f32::from_le_bytes(*bytes);
            }
        }
        ScaleType::F16 => V::load_f16(&words_of(bytes)).store(numbers),
        ScaleType::Bf16 => V::load_bf16(&words_of(bytes)).store(numbers),
        ScaleType::E4m3 => V::load_e4m3(&of_bytes(bytes)).store(numbers),
        ScaleType::U8Super => V::load_bytes(&of_bytes(bytes)).store(numbers),
        ScaleType::E8m0 | ScaleType::I8Super => {
            for (number_, byte) in numbers.iter_mut().zip(bytes) {
                *number_ = number(kind, &[*byte], 1.0);
            }
        }
    }
}

struct Order<'s, T> {
    row: &'s [T],
    places: &'static [u8; TILE],
    vectors: usize,
    ordered: &'s mut [[f32; LANES]],
}

impl<T: FloatElement> Work for Order<'_, T> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        for (tile, ordered) in self.ordered.chunks_exact_mut(self.vectors).enumerate() {
            let from = &self.row[(tile * TILE).min(self.row.len())..];
            let mut values = [T::zeroed(); TILE];
            let len = from.len().min(TILE);
            values[..len].copy_from_slice(&from[..len]);
            let mut numbers = [0.0; TILE];
            for (numbers, values) in std::iter::zip(numbers.as_chunks_mut().0, values.as_chunks().0) {
                load::<V, T>(values).store(numbers);
            }
            let (elements, sums) = ordered.split_at_mut(4);
            for (to, &place) in std::iter::zip(elements.as_flattened_mut(), self.places) {
                *to = numbers[usize::from(place) % TILE];
            }
            // Minimums are subtracted.
            for (sums, pair) in std::iter::zip(sums, elements.as_chunks::<2>().0) {
                V::splat(0.0).sub(V::load(&pair[0])).sub(V::load(&pair[1])).store(sums);
            }
        }
    }
}

struct OneRow<'s> {
    packed: &'s Packed<'s>,
    row: usize,
    first: usize,
    values: &'s mut [f32],
}

impl Work for OneRow<'_> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let OneRow { packed, row, first, values } = self;
        let places = packed.places();
        for (tile, values) in values.chunks_mut(TILE).enumerate() {
            let mut rows = [[0.0; TILE]; ROWS];
            let columns = first + tile * TILE..first + (tile + 1) * TILE;
            packed.row_block::<V>((0, row / ROWS), columns, (rows.as_flattened_mut(), TILE));
            for (value, &place) in std::iter::zip(&rows[row % ROWS], places) {
                if let Some(to) = values.get_mut(usize::from(place)) {
                    *to = *value;
                }
            }
        }
    }
}

struct FewRows<'s> {
    packed: &'s Packed<'s>,
    expert: usize,
    block: usize,
    rows: &'s [[f32; LANES]],
    sums: &'s mut [[f32; ROWS]],
}

/// Most rows that are multiplied at once.
pub(crate) const FEW_ROWS: usize = 8;

impl Work for FewRows<'_> {
    type Out = ();

    #[inline(always)]
    fn with<V: Lanes>(self) {
        let FewRows { packed, expert, block, rows, sums } = self;
        let count = sums.len().min(FEW_ROWS);
        let vectors = packed.vectors();
        let length = packed.counts.tiles * vectors;
        let lanes = [[V::splat(0.0); ROWS]; FEW_ROWS];
        let mut products = Products { rows, count, vectors, length, lanes };
        packed.for_tiles::<V>(expert, block, 0..packed.counts.tiles, &mut products);
        for (sums, lanes) in std::iter::zip(sums, &products.lanes) {
            for (sum, lanes) in std::iter::zip(sums, lanes) {
                *sum = lanes.sum();
            }
        }
    }
}

/// Sums of products with so many rows of a.
struct Products<'s, V> {
    rows: &'s [[f32; LANES]],
    count: usize,
    /// Of a tile, and of a row.
    vectors: usize,
    length: usize,
    lanes: [[V; ROWS]; FEW_ROWS],
}

impl<V: Lanes> Decoded<V> for Products<'_, V> {
    #[inline(always)]
    fn row(&mut self, tile: usize, row: usize, values: [V; 4], level: LevelLanes<V>) {
        for (i, lanes) in self.lanes.iter_mut().enumerate().take(self.count) {
            let x = &self.rows[i * self.length + tile * self.vectors..][..self.vectors];
            let first = V::load(&x[1]).mul_add(values[1], V::load(&x[0]).mul(values[0]));
            let all = V::load(&x[3]).mul_add(values[3], V::load(&x[2]).mul_add(values[2], first));
            let mut sum = all.mul_add(level.scales, lanes[row]);
            if level.has_minimums {
                sum = V::load(&x[4]).mul_add(level.minimums, sum);
                sum = V::load(&x[5]).mul_add(level.minimums, sum);
            }
            lanes[row] = sum;
        }
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::simd::{Level, by};

    /// Places of rows and columns are those of the layout.
    #[test]
    fn codes_are_where_the_layout_says() {
        for (row, i) in (0..ROWS).flat_map(|row| (0..TILE).map(move |i| (row, i))) {
            let (upper, lower) = (row % 8, row / 8);
            let column = u32::from(places_of_nibbles()[i]);
            let place = ((upper * 16 + i % LANES) as u32, 4 * (FIELDS[i / LANES] + lower as u32));
            assert_eq!(Codes::Int4.place(row as u32, column), place, "{row} {i}");
            let (word, bit) = Codes::Int8.place(row as u32, places_of_bytes()[i].into());
            let byte = row * 64 + i;
            assert_eq!((word * 4 + bit / 8) as usize, byte, "{row} {i}");
            let (word, bit) = Codes::E6m9.place(row as u32, places_of_halves()[i].into());
            let byte = (2 * lower + i / 32) * 512 + upper * 64 + i % 32 * 2;
            assert_eq!((word * 4 + bit / 8) as usize, byte, "{row} {i}");
        }
    }

    struct Block<'s>(&'s Packed<'s>, usize, &'s mut [f32]);

    impl Work for Block<'_> {
        type Out = ();

        #[inline(always)]
        fn with<V: Lanes>(self) {
            self.0.row_block::<V>((0, self.1), 0..self.0.columns(), (self.2, self.0.columns()));
        }
    }

    /// The values of a row of tiles by these instructions, rows of a multiple of 64 columns as they are numbered.
    pub(crate) fn values(level: Level, packed: &Packed<'_>, block: usize) -> Vec<f32> {
        let mut ordered = vec![f32::NAN; ROWS * packed.columns()];
        by(level, Block(packed, block, &mut ordered));
        let mut values = vec![f32::NAN; ordered.len()];
        for (ordered, values) in std::iter::zip(ordered.chunks(TILE), values.chunks_mut(TILE)) {
            for (value, &place) in std::iter::zip(ordered, packed.places()) {
                values[usize::from(place)] = *value;
            }
        }
        values
    }

    /// Products of these rows and a row of tiles by these instructions.
    pub(crate) fn products(
        level: Level,
        packed: &Packed<'_>,
        block: usize,
        rows: &[Vec<f32>],
    ) -> Vec<[f32; ROWS]> {
        let length = packed.ordered_len() / LANES;
        let mut ordered = vec![[f32::NAN; LANES]; length * rows.len()];
        for (row, ordered) in std::iter::zip(rows, ordered.chunks_mut(length)) {
            by(level, Order { row, places: packed.places(), vectors: packed.vectors(), ordered });
        }
        let mut sums = vec![[f32::NAN; ROWS]; rows.len()];
        by(level, FewRows { packed, expert: 0, block, rows: &ordered, sums: &mut sums });
        sums
    }
}
