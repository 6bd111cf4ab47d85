//! Packed weights on the CPU: products of few rows from the codes as they lie, and rows of tiles as f32.
//!
//! The columns of a tile stay in the order in which a vector of codes has them; what they are multiplied by is put into
//! that order once.

mod numbers;
mod products;

use std::array;
use std::ops::Range;

use abi::weight::{BLOCK_SCALES, Codes, Layout, SUPER_K, ScaleType, TILE_K, TILE_ROWS};

use super::{Counts, Weight};
use crate::simd::{LANES, Lanes, Level, Work, by_best, load};
use crate::tensor::FloatElement;
pub(crate) use numbers::{e2m1, number};
use numbers::{read_numbers, words_of};
pub(crate) use products::FEW_ROWS;
use products::FewRows;

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

impl<'a> Packed<'a> {
    /// Of a weight in host memory.
    pub(crate) fn new(weight: &'a Weight) -> Self {
        let [codes, scales, zeros, minimums, supers, super_minimums] = weight
            .parts()
            .map(|part| part.map_or(&[][..], |part| bytemuck::cast_slice(part.host_slice::<i8>())));
        let counts = weight.counts();
        Packed { weight, counts, codes, scales, zeros, minimums, supers, super_minimums }
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
        self.for_tiles::<V, _>(
            expert,
            block,
            tiles.clone(),
            &mut Values { first: tiles.start, values, stride },
        );
    }

    /// Columns of a row from `first` on, a multiple of a tile's, as many as there is room for.
    pub(crate) fn row(&self, row: usize, first: usize, values: &mut [f32]) {
        by_best(OneRow { packed: self, row, first, values });
    }

    /// Gives each row of these tiles to `user`.
    #[inline(always)]
    fn for_tiles<V: Lanes, U: Decoded<V>>(
        &self,
        expert: usize,
        block: usize,
        tiles: Range<usize>,
        user: &mut U,
    ) {
        let layout = self.weight.layout;
        // What the inner loop does not have to ask.
        let is_plain = self.counts.per_stretch == 1 && !layout.minimums;
        // Of integers alone, by what layouts there are.
        if U::MINIMUMS_ONLY {
            return match layout.codes {
                Codes::Int4 => self.for_tiles_of::<V, INT4, 8, false>(expert, block, tiles, user),
                _ => self.for_tiles_of::<V, INT8, 16, false>(expert, block, tiles, user),
            };
        }
        match (layout.codes, is_plain) {
            (Codes::Int4, true) => self.for_tiles_of::<V, INT4, 8, true>(expert, block, tiles, user),
            (Codes::Int4, false) => self.for_tiles_of::<V, INT4, 8, false>(expert, block, tiles, user),
            (Codes::Int8, true) => self.for_tiles_of::<V, INT8, 16, true>(expert, block, tiles, user),
            (Codes::Int8, false) => self.for_tiles_of::<V, INT8, 16, false>(expert, block, tiles, user),
            (Codes::E2m1, true) => self.for_tiles_of::<V, E2M1, 8, true>(expert, block, tiles, user),
            (Codes::E2m1, false) => self.for_tiles_of::<V, E2M1, 8, false>(expert, block, tiles, user),
            (Codes::E4m3, true) => self.for_tiles_of::<V, E4M3, 16, true>(expert, block, tiles, user),
            (Codes::E4m3, false) => self.for_tiles_of::<V, E4M3, 16, false>(expert, block, tiles, user),
            // They have one scale for a row.
            (Codes::E6m9, _) => self.for_tiles_of::<V, E6M9, 32, true>(expert, block, tiles, user),
        }
    }

    /// The same of these codes, so many `PIECES` of 64 bytes a tile. `PLAIN`: one scale for a row of a tile, and no
    /// minimums.
    #[inline(always)]
    fn for_tiles_of<V: Lanes, const CODES: u8, const PIECES: usize, const PLAIN: bool>(
        &self,
        expert: usize,
        block: usize,
        tiles: Range<usize>,
        user: &mut impl Decoded<V>,
    ) {
        let block_of_all = expert * self.counts.row_blocks + block;
        let mut levels = [Levels { scales: NO_LEVELS, minimums: NO_LEVELS, zeros: NO_LEVELS }; TOGETHER];
        // Bytes as they are come faster one after the other, and so do all where a vector is two of the CPU's.
        let together = if CODES == INT8 || V::LEVEL == Level::Avx2 { 1 } else { TOGETHER };
        // Which stretch's the first levels are.
        let mut known = usize::MAX;
        for first in tiles.clone().step_by(together) {
            let count = together.min(tiles.end - first);
            // Groups of several tiles have theirs from the first.
            let mut level_of = [0; TOGETHER];
            for i in 0..count {
                let (tile, stretch) = (first + i, self.stretch(first + i));
                if i > 0 && stretch == self.stretch(tile - 1) {
                    level_of[i] = level_of[i - 1];
                    continue;
                }
                level_of[i] = i;
                if i > 0 || stretch != known {
                    self.read_levels::<V, PLAIN>((expert, block_of_all), (tile, stretch), &mut levels[i]);
                }
                if i == 0 {
                    known = stretch;
                }
            }
            let (pieces, _) = self.codes.as_chunks::<64>();
            let (pieces, _) = pieces.as_chunks::<PIECES>();
            let start = block_of_all * self.counts.tiles + first;
            let rows = Together {
                layout: &self.weight.layout,
                first,
                tiles: &pieces[start..start + count],
                levels: &levels,
                level_of,
            };
            for row in 0..ROWS / 2 {
                rows.row::<V, CODES, PLAIN, 0>(row, user);
                rows.row::<V, CODES, PLAIN, 1>(row, user);
            }
        }
    }

    /// Where the scales of a tile begin, in stretches.
    #[inline(always)]
    fn stretch(&self, tile: usize) -> usize {
        let group = self.weight.layout.group as usize;
        if group != 0 && group <= TILE { tile } else { (tile * TILE).checked_div(group).unwrap_or(0) }
    }

    /// What the codes of a stretch's rows become values by. `PLAIN`: only the first step's, and no minimums.
    #[inline(always)]
    fn read_levels<V: Lanes, const PLAIN: bool>(
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
            // By places alone: weights with such blocks are plain.
            levels.scales[0] = array::from_fn(|place| scales[place / 2 % 2]);
            levels.zeros = [[f32::from(layout.zero()); LANES]; STEPS];
            return;
        }
        let first = (block_of_all * stretches + stretch) * ROWS * per_stretch;
        let first_super = (block_of_all * supers + tile / (SUPER_K / TILE_K) as usize) * ROWS;
        let parts = [(self.scales, self.supers), (self.minimums, self.super_minimums)];
        let with_minimums = !PLAIN && layout.minimums;
        for (part, (of, supers)) in parts.into_iter().enumerate().take(1 + usize::from(with_minimums)) {
            let mut factors = [if kind == ScaleType::E4m3 { global } else { 1.0 }; ROWS];
            if kind.has_supers() {
                V::load_f16(&words_of(&supers[2 * first_super..])).store(&mut factors);
            }
            let mut numbers = [[0.0; LANES]; STEPS];
            for i in 0..if PLAIN { 1 } else { per_stretch.min(STEPS) } {
                let of = &of[(first + i * LANES) * bytes..][..LANES * bytes];
                read_numbers::<V>(kind, of, &mut numbers[i]);
            }
            let to = if part == 0 { &mut levels.scales } else { &mut levels.minimums };
            if PLAIN {
                V::load(&numbers[0]).mul(V::load(&factors)).store(&mut to[0]);
                continue;
            }
            spread(&mut numbers, per_stretch);
            for (quarter, to) in to.iter_mut().enumerate() {
                let mut of_rows = [0.0; LANES];
                for (i, factor) in of_rows.iter_mut().enumerate() {
                    *factor = factors[quarter * STEPS + i / STEPS];
                }
                V::load(&numbers[quarter]).mul(V::load(&of_rows)).store(to);
            }
        }
        if !layout.zeros {
            levels.zeros = [[f32::from(layout.zero()); LANES]; STEPS];
            return;
        }
        let mut numbers = [[0.0; LANES]; STEPS];
        let (zeros, _) = self.zeros[first..].as_chunks();
        let count = if PLAIN { 1 } else { per_stretch.min(STEPS) };
        for (numbers, zeros) in std::iter::zip(&mut numbers[..count], zeros) {
            V::load_bytes(zeros).store(numbers);
        }
        if !PLAIN {
            spread(&mut numbers, per_stretch);
        }
        levels.zeros = numbers;
    }
}

/// Rows of some tiles, one after the other, so that what is summed up for a row stays in registers, and the lines that
/// are read are near each other.
struct Together<'s, const PIECES: usize> {
    layout: &'s Layout,
    /// The first of the tiles.
    first: usize,
    tiles: &'s [[[u8; 64]; PIECES]],
    levels: &'s [Levels; TOGETHER],
    /// Which of them a tile has.
    level_of: [usize; TOGETHER],
}

impl<const PIECES: usize> Together<'_, PIECES> {
    /// The row, or that half a tile below it where `LOWER` is 1.
    #[inline(always)]
    fn row<V: Lanes, const CODES: u8, const PLAIN: bool, const LOWER: usize>(
        &self,
        row: usize,
        user: &mut impl Decoded<V>,
    ) {
        let layout = self.layout;
        let mut nibbles = [0.0; LANES];
        for (code, value) in nibbles.iter_mut().enumerate() {
            *value = if CODES == E2M1 { e2m1(code as u8) } else { code as f32 };
        }
        let nibbles = V::load(&nibbles);
        let place = 2 * row + LOWER;
        // One step has another scale than the next.
        let is_narrow = !PLAIN && layout.group != 0 && (layout.group as usize) < TILE;
        let kind = (is_narrow, if CODES < INT8 { 4 } else { 8 });
        let zeros_differ = layout.zeros && is_narrow;
        let has_minimums = !PLAIN && layout.minimums;
        let mut state = user.begin(row + LOWER * (ROWS / 2), self.first..self.first + self.tiles.len());
        for (i, pieces) in self.tiles.iter().enumerate() {
            // The CPU does not do so by itself in time: much is done with each line. Of 4 bits two rows have one.
            for line in 0..if PIECES < ROWS { 1 - LOWER } else { PIECES / ROWS } {
                let line = place * PIECES / ROWS + line;
                V::prefetch(pieces[line % PIECES].as_slice(), AHEAD);
            }
            // The remainders change nothing and spare checks.
            let levels = &self.levels[self.level_of[i % TOGETHER] % TOGETHER];
            // Of 4 bits two rows have a piece together.
            let codes = &pieces[if CODES < INT8 { row } else { row + LOWER * (ROWS / 2) }];
            let zero = V::splat(levels.zeros.as_flattened()[if PLAIN { place } else { place * STEPS }]);
            let mut decoded = [zero; 4];
            match CODES {
                INT4 | E2M1 => {
                    let zero = if zeros_differ { V::splat(0.0) } else { zero };
                    let table = if CODES == E2M1 { nibbles } else { nibbles.sub(zero) };
                    let words = V::words(codes);
                    for i in 0..4 {
                        let field = FIELDS[i] + LOWER as u32;
                        decoded[i] = match CODES {
                            INT4 => V::integers(words, field, zero, table),
                            _ => V::look_up(words, field, table),
                        };
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
                    let line = |line: usize| &pieces[(2 * LOWER + line) * (ROWS / 2) + row];
                    for (i, decoded) in decoded.iter_mut().enumerate() {
                        *decoded = V::load_e6m9(&words_of(&line(i / 2)[i % 2 * 32..]));
                    }
                }
            }
            if zeros_differ {
                let zeros = levels_as_lanes::<V, PLAIN>(&levels.zeros, place, kind);
                for value in &mut decoded {
                    *value = value.sub(zeros);
                }
            }
            let scales = levels_as_lanes::<V, PLAIN>(&levels.scales, place, kind);
            let minimums = if has_minimums {
                levels_as_lanes::<V, PLAIN>(&levels.minimums, place, kind)
            } else {
                scales
            };
            user.add(&mut state, i, decoded, LevelLanes { scales, minimums, has_minimums });
        }
        user.end(row + LOWER * (ROWS / 2), state);
    }
}

/// Tiles whose rows come one after the other.
const TOGETHER: usize = 4;

/// Bytes of codes from those that are multiplied to those that are fetched.
const AHEAD: usize = 4096;

/// [`Codes`] as parameters; those of four bits are below those of more.
const INT4: u8 = 0;
const E2M1: u8 = 1;
const INT8: u8 = 2;
const E4M3: u8 = 3;
const E6M9: u8 = 4;

/// Columns of a tile, and its steps of 16.
const TILE: usize = TILE_K as usize;
const STEPS: usize = TILE / 16;

/// A value is `(code − zero) · scale − minimum`. Numbers are by the row's place among the scales alone, in the first
/// sixteen, where a row of a tile has one; else by the row's place and the step.
#[derive(Clone, Copy)]
struct Levels {
    scales: [[f32; LANES]; STEPS],
    minimums: [[f32; LANES]; STEPS],
    zeros: [[f32; LANES]; STEPS],
}

const NO_LEVELS: [[f32; LANES]; STEPS] = [[0.0; LANES]; STEPS];

/// So many numbers of each row become four.
#[inline(always)]
fn spread(numbers: &mut [[f32; LANES]; STEPS], per_stretch: usize) {
    // Loops of a constant stride each, which become vectors.
    match per_stretch {
        1 => each_times::<4>(numbers),
        2 => each_times::<2>(numbers),
        _ => {}
    }
}

#[inline(always)]
fn each_times<const TIMES: usize>(numbers: &mut [[f32; LANES]; STEPS]) {
    let from = *numbers;
    let from = from.as_flattened();
    for (i, number) in numbers.as_flattened_mut().iter_mut().enumerate() {
        *number = from[i / TIMES];
    }
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
fn levels_as_lanes<V: Lanes, const PLAIN: bool>(
    of: &[[f32; LANES]; STEPS],
    place: usize,
    (is_narrow, bits): (bool, u32),
) -> V {
    if PLAIN {
        return V::splat(of[0][place]);
    }
    let [a, b, c, d] = of.as_flattened().as_chunks::<STEPS>().0[place];
    match (is_narrow, bits) {
        (false, _) => V::splat(a),
        (true, 4) => V::load(&[a, b, c, d, a, b, c, d, a, b, c, d, a, b, c, d]),
        (true, _) => V::load(&[a, a, a, a, b, b, b, b, c, c, c, c, d, d, d, d]),
    }
}

/// What is done with the rows of tiles.
trait Decoded<V> {
    /// What is kept of a row from one tile to the next.
    type State;

    /// Whether it is of weights with minimums alone.
    const MINIMUMS_ONLY: bool;

    /// Of a row of these tiles.
    fn begin(&self, row: usize, tiles: Range<usize>) -> Self::State;
    /// Takes the codes of the row of one of the tiles, counted from their first, less their zero points, in the order
    /// of [`Packed::places`].
    fn add(&mut self, state: &mut Self::State, tile: usize, decoded: [V; 4], level: LevelLanes<V>);
    fn end(&mut self, row: usize, state: Self::State);
}

/// Rows of tiles from `first` on, one after the other.
struct Values<'s> {
    first: usize,
    values: &'s mut [f32],
    stride: usize,
}

impl<V: Lanes> Decoded<V> for Values<'_> {
    /// Where the row begins.
    type State = usize;

    const MINIMUMS_ONLY: bool = false;

    #[inline(always)]
    fn begin(&self, row: usize, tiles: Range<usize>) -> usize {
        row * self.stride + (tiles.start - self.first) * TILE
    }

    #[inline(always)]
    fn add(&mut self, start: &mut usize, tile: usize, decoded: [V; 4], level: LevelLanes<V>) {
        let to = &mut self.values[*start + tile * TILE..][..TILE];
        let (to, _) = to.as_chunks_mut::<LANES>();
        for i in 0..4 {
            let mut value = decoded[i].mul(level.scales);
            if level.has_minimums {
                value = value.sub(level.minimums);
            }
            value.store(&mut to[i]);
        }
    }

    #[inline(always)]
    fn end(&mut self, _: usize, _: usize) {}
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::simd::by;

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
