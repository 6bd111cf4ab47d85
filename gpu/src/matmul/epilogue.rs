//! What becomes of a sum on its way to out: `act(scale · sum + bias) + residual`, rounded once.
//!
//! The options come with the launch, since looking at them at the end of a tile costs nothing. Where the product is
//! *gated*, b has two rows for each column of out, one of the gate and one of up, which a thread holds both:
//!
//! | kernels | rows of b as the tile sees them |
//! |---|---|
//! | `Gemv`, `Simt`, `Mma`, `Stream` | gate 0, up 0, gate 1, …: [`rows_of_b`]; a thread has neighbouring columns |
//! | `Wgmma` | the tile's gates, then its ups: two loads; a thread has the same columns of either half |
//!
//! Nothing else of the main loops knows of it, and they read and multiply what they would without: the rows of b in
//! memory stay as they are.

use abi::ops::matmul::{
    ACTIVATED, GATED, MatmulDims, MatmulEpilogue, OUT_IN_F32, OUT_IN_QUADS, RESIDUAL_IN_QUADS, SILU,
};
use cuda_std::cvt::Element;
use cuda_std::{global, thread};

use super::simt;
use crate::tile::activation;

/// Where the rows of b begin, those of the gate and of up in turn if the product is gated.
#[inline(always)]
pub fn rows_of_b<T>(
    b: *const T,
    up: *const T,
    dims: &MatmulDims,
    how: &MatmulEpilogue,
) -> impl Fn(u32) -> *const T + use<T> {
    let (stride, gated) = (dims.b_stride as usize, how.options & GATED != 0);
    move |row| {
        let (from, row) = match (gated, row % 2) {
            (true, 0) => (b, row / 2),
            (true, _) => (up, row / 2),
            (false, _) => (b, row),
        };
        from.wrapping_add(row as usize * stride)
    }
}

/// Nothing but the sums, and a bias if there is one.
pub const PLAIN: MatmulEpilogue =
    MatmulEpilogue { scale: 1.0, options: 0, residual_stride: 0, residual_batch_stride: 0, curve: SILU };

/// The end of a block's product.
#[derive(Clone, Copy)]
pub struct Epilogue<'a, T, O> {
    bias: *const T,
    residual: *const O,
    out: *mut O,
    /// Sizes of the product.
    pub dims: &'a MatmulDims,
    how: &'a MatmulEpilogue,
}

impl<'a, T: Element, O: Element> Epilogue<'a, T, O> {
    /// `out` and `residual` are those of the first product.
    #[inline(always)]
    pub fn new(
        bias: *const T,
        residual: *const O,
        out: *mut O,
        dims: &'a MatmulDims,
        how: &'a MatmulEpilogue,
    ) -> Self {
        Epilogue { bias, residual, out, dims, how }
    }

    /// The same for a part of the product.
    #[inline(always)]
    pub fn with_dims<'b>(&self, dims: &'b MatmulDims) -> Epilogue<'b, T, O>
    where
        'a: 'b,
    {
        Epilogue { bias: self.bias, residual: self.residual, out: self.out, dims, how: self.how }
    }

    /// Where out of this block's product begins. Looked up here, where the main loop's registers are free again.
    #[inline(always)]
    pub fn out(&self) -> *mut O {
        self.out.wrapping_add(thread::block_idx_z() as usize * self.dims.out_batch_stride as usize)
    }

    /// Where a row of it begins.
    #[inline(always)]
    pub fn out_row(&self, row: u32) -> *mut O {
        self.out().wrapping_add(row as usize * self.dims.out_stride as usize)
    }

    /// Whether nothing but the bias is asked for.
    #[inline(always)]
    pub fn is_plain(&self) -> bool {
        self.how.options == 0 && self.how.scale == 1.0 && self.residual.is_null()
    }

    /// Whether b has two rows for each column of out.
    #[inline(always)]
    pub fn is_gated(&self) -> bool {
        self.how.options & GATED != 0
    }

    /// Columns of out.
    #[inline(always)]
    pub fn n(&self) -> u32 {
        if self.is_gated() { self.dims.n / 2 } else { self.dims.n }
    }

    /// Whether an activation is asked for.
    #[inline(always)]
    pub fn is_activated(&self) -> bool {
        self.how.options & ACTIVATED != 0
    }

    /// The activation of a value.
    #[inline(always)]
    pub fn activated(&self, x: f32) -> f32 {
        activation::curve(x, &self.how.curve)
    }

    /// The first half of it, to be completed by [`activation::bent`].
    #[inline(always)]
    pub fn exponent(&self, x: f32) -> f32 {
        activation::exponent(x, &self.how.curve)
    }

    /// Whether the curve is a constant: SiLU's alone has no second coefficient.
    #[inline(always)]
    pub fn is_straight(&self) -> bool {
        self.how.curve[1] == 0.0
    }

    /// As `activated` where it is.
    #[inline(always)]
    pub fn activated_straight(&self, x: f32) -> f32 {
        activation::bent(x, x * self.how.curve[0])
    }

    /// Factor of the sums.
    #[inline(always)]
    pub fn scale(&self) -> f32 {
        self.how.scale
    }

    /// Whether there is a bias.
    #[inline(always)]
    pub fn has_bias(&self) -> bool {
        !self.bias.is_null()
    }

    /// The bias of a column of out, or of its gate; 0 where there is no such column.
    ///
    /// # Safety
    /// - There is a bias.
    #[inline(always)]
    pub unsafe fn bias_of(&self, col: u32) -> f32 {
        // SAFETY: below n — the caller.
        if col < self.n() { unsafe { global::load(self.bias.add(col as usize)) }.to_f32() } else { 0.0 }
    }

    /// The bias of a column's up.
    ///
    /// # Safety
    /// - There is a bias, and the product is gated.
    #[inline(always)]
    pub unsafe fn bias_of_up(&self, col: u32) -> f32 {
        let at = self.n() as usize + col as usize;
        // SAFETY: below 2 n — the caller.
        if col < self.n() { unsafe { global::load(self.bias.add(at)) }.to_f32() } else { 0.0 }
    }

    /// Whether a residual is added.
    #[inline(always)]
    pub fn has_residual(&self) -> bool {
        !self.residual.is_null()
    }

    /// The residual of four neighbouring columns of out, as far as they exist.
    ///
    /// # Safety
    /// - The row is one of out; there is a residual.
    #[inline(always)]
    pub unsafe fn residual_quad(&self, row: u32, col: u32) -> [f32; 4] {
        // SAFETY: the caller's promise, and `access`.
        unsafe {
            let from = self.residual_row(row);
            if self.dims.access & RESIDUAL_IN_QUADS != 0 && col + 4 <= self.n() {
                let at = from.add(col as usize);
                let mut values = [0.0; 8];
                if O::PER_16_BYTES == 4 {
                    O::unpack(global::load_x4(at), &mut values);
                } else {
                    let pair = global::load(at.cast::<u64>());
                    O::unpack([pair as u32, (pair >> 32) as u32, 0, 0], &mut values);
                }
                [values[0], values[1], values[2], values[3]]
            } else {
                simt::load_quad(from, col, self.n())
            }
        }
    }

    /// Where a row of the residual begins.
    #[inline(always)]
    pub fn residual_row(&self, row: u32) -> *const O {
        let product = thread::block_idx_z() as usize * self.how.residual_batch_stride as usize;
        self.residual.wrapping_add(product).wrapping_add(row as usize * self.how.residual_stride as usize)
    }

    /// The residual of a column of out, and of the next one if it exists.
    ///
    /// # Safety
    /// - `from` is where a row of it begins; the column is one of out and even.
    #[inline(always)]
    pub unsafe fn residual_pair(&self, from: *const O, col: u32) -> [f32; 2] {
        let mut values = [0.0; 8];
        // SAFETY: the caller's promise, and `access`.
        unsafe {
            let at = from.add(col as usize);
            let both = col + 1 < self.n();
            if self.dims.access & RESIDUAL_IN_QUADS != 0 && both {
                if O::PER_16_BYTES == 4 {
                    let pair = global::load(at.cast::<u64>());
                    O::unpack([pair as u32, (pair >> 32) as u32, 0, 0], &mut values);
                } else {
                    O::unpack([global::load(at.cast::<u32>()), 0, 0, 0], &mut values);
                }
            } else {
                values[0] = global::load(at).to_f32();
                values[1] = if both { global::load(at.add(1)).to_f32() } else { 0.0 };
            }
        }
        [values[0], values[1]]
    }

    /// The bias of `N` neighbouring columns of b, as far as they exist; else 0.
    ///
    /// # Safety
    /// - Bias, if there is one, *in-bounds* for `dims`.
    #[inline(always)]
    pub unsafe fn bias<const N: usize>(&self, col: u32) -> [f32; N] {
        let mut values = [0.0; N];
        if !self.bias.is_null() {
            let mut i = 0;
            while i < N {
                let at = col + i as u32;
                if at < self.dims.n {
                    let at = if self.is_gated() { at / 2 + at % 2 * self.n() } else { at };
                    // SAFETY: below n, the length of bias.
                    values[i] = unsafe { global::load(self.bias.add(at as usize)) }.to_f32();
                }
                i += 1;
            }
        }
        values
    }

    /// What `N` neighbouring columns of b from an even one on come to, before the residual; if the product is gated, it
    /// is in the first half.
    #[inline(always)]
    fn values<const N: usize>(&self, mut values: [f32; N], bias: &[f32; N]) -> [f32; N] {
        let mut i = 0;
        while i < N {
            values[i] = values[i] * self.how.scale + bias[i];
            i += 1;
        }
        if self.is_activated() {
            let mut i = 0;
            while i < N {
                values[i] = self.activated(values[i]);
                if !self.is_gated() && i + 1 < N {
                    values[i + 1] = self.activated(values[i + 1]);
                }
                i += 2;
            }
        }
        if self.is_gated() {
            let mut i = 0;
            while i < N / 2 {
                values[i] = values[2 * i] * values[2 * i + 1];
                i += 1;
            }
        }
        values
    }

    /// Finishes an element, given its sum and that of the next column; if the product is gated, the element that the
    /// two make.
    ///
    /// # Safety
    /// - The row and column exist; tensors *in-bounds* for `dims`; *exclusive*: the element is this thread's.
    #[inline(always)]
    pub unsafe fn element(&self, row: u32, col: u32, [sum, next]: [f32; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            let (mut value, col) = if self.is_gated() {
                (self.values([sum, next], &self.bias(col))[0], col / 2)
            } else {
                (self.values([sum], &self.bias(col))[0], col)
            };
            if self.has_residual() {
                value += global::load(self.residual_row(row).add(col as usize)).to_f32();
            }
            global::store(self.out_row(row).add(col as usize), O::from_f32(value));
        }
    }

    /// The residual that [`Self::element_of`] adds; 0 if there is none.
    ///
    /// # Safety
    /// - The row and column of b exist; the residual *in-bounds* for `dims`.
    #[cfg(not(lacks_dependent_launch))]
    #[inline(always)]
    pub unsafe fn residual_of(&self, row: u32, col: u32) -> f32 {
        let col = if self.is_gated() { col / 2 } else { col };
        match self.has_residual() {
            // SAFETY: the caller's promise.
            true => unsafe { global::load(self.residual_row(row).add(col as usize)) }.to_f32(),
            false => 0.0,
        }
    }

    /// As [`Self::element`], given the residual.
    ///
    /// # Safety
    /// - As [`Self::element`].
    #[cfg(not(lacks_dependent_launch))]
    #[inline(always)]
    pub unsafe fn element_of(&self, row: u32, col: u32, [sum, next]: [f32; 2], residual: f32) {
        // SAFETY: the caller's promise.
        unsafe {
            let (mut value, col) = if self.is_gated() {
                (self.values([sum, next], &self.bias(col))[0], col / 2)
            } else {
                (self.values([sum], &self.bias(col))[0], col)
            };
            if self.has_residual() {
                value += residual;
            }
            global::store(self.out_row(row).add(col as usize), O::from_f32(value));
        }
    }

    /// Finishes four neighbouring columns of b, of this bias, as far as they exist.
    ///
    /// # Safety
    /// - The row and the first column exist, a multiple of 4; tensors *in-bounds* for `dims` and aligned as `access`
    ///   says; *exclusive*: the elements are this thread's.
    #[inline(always)]
    pub unsafe fn quad(&self, row: u32, col: u32, sums: [f32; 4], bias: &[f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe {
            let values = self.values(sums, bias);
            if self.is_gated() {
                self.finish_pair(row, col / 2, [values[0], values[1]]);
            } else {
                self.store_quad(row, col, values);
            }
        }
    }

    /// As [`Self::quad`], of kernels that store to f32 if that is asked for.
    ///
    /// # Safety
    /// - As [`Self::quad`]; out is f32 if [`OUT_IN_F32`] is set.
    #[inline(always)]
    pub unsafe fn quad_to_any(&self, row: u32, col: u32, sums: [f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.how.options & OUT_IN_F32 == 0 {
                return self.quad(row, col, sums, &self.bias(col));
            }
            let scale = self.how.scale;
            let values = [sums[0] * scale, sums[1] * scale, sums[2] * scale, sums[3] * scale];
            simt::store_quad(self.out.cast::<f32>(), row, col, values, self.dims);
        }
    }

    /// The same for eight neighbouring columns of b.
    ///
    /// # Safety
    /// - As [`Self::quad`], the first column a multiple of 8.
    #[cfg(not(lacks_mma_sync))]
    #[inline(always)]
    pub unsafe fn octet(&self, row: u32, col: u32, sums: [f32; 8], bias: &[f32; 8]) {
        // SAFETY: the caller's promise; the second half is stored only where it exists.
        unsafe {
            let [v0, v1, v2, v3, v4, v5, v6, v7] = self.values(sums, bias);
            if self.is_gated() {
                self.store_quad(row, col / 2, [v0, v1, v2, v3]);
                return;
            }
            let mut values = [v0, v1, v2, v3, v4, v5, v6, v7];
            if self.has_residual() {
                let (low, high) = (self.residual_quad(row, col), self.residual_quad(row, col + 4));
                let mut i = 0;
                while i < 4 {
                    values[i] += low[i];
                    values[i + 4] += high[i];
                    i += 1;
                }
            }
            simt::store_octet(self.out(), row, col, &values, self.dims);
        }
    }

    /// Adds the residual to four columns of out, rounds and stores them, as far as they exist.
    ///
    /// # Safety
    /// - As [`Self::quad`].
    #[inline(always)]
    unsafe fn store_quad(&self, row: u32, col: u32, mut values: [f32; 4]) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.has_residual() {
                let residual = self.residual_quad(row, col);
                let mut i = 0;
                while i < 4 {
                    values[i] += residual[i];
                    i += 1;
                }
            }
            simt::store_quad(self.out(), row, col, values, &MatmulDims { n: self.n(), ..*self.dims });
        }
    }

    /// The same for two columns of out, the first an even one.
    ///
    /// # Safety
    /// - As [`Self::quad`].
    #[inline(always)]
    unsafe fn finish_pair(&self, row: u32, col: u32, mut values: [f32; 2]) {
        // SAFETY: the caller's promise.
        unsafe {
            if self.has_residual() {
                let residual = self.residual_pair(self.residual_row(row), col);
                values[0] += residual[0];
                values[1] += residual[1];
            }
            self.store_pair(self.out_row(row), col, values);
        }
    }

    /// Rounds and stores a column of out, and the next one if it exists.
    ///
    /// # Safety
    /// - `row` is where a row of out begins; the column exists and is even; *exclusive*: the elements are this
    ///   thread's.
    #[inline(always)]
    pub unsafe fn store_pair(&self, row: *mut O, col: u32, values: [f32; 2]) {
        let packed = O::pack(&[values[0], values[1], 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
        let both = col + 1 < self.n();
        // SAFETY: the caller's promise, and `access`.
        unsafe {
            let to = row.add(col as usize);
            if self.dims.access & OUT_IN_QUADS == 0 || !both {
                simt::store_packed(to, packed, 0);
                if both {
                    simt::store_packed(to.add(1), packed, 1);
                }
            } else if O::PER_16_BYTES == 4 {
                global::store(to.cast::<u64>(), u64::from(packed[0]) | u64::from(packed[1]) << 32);
            } else {
                global::store(to.cast::<u32>(), packed[0]);
            }
        }
    }
}
