//! Fused and approximate f32 arithmetic, and integer dot products.
//!
//! rustc contracts nothing and rounds `/` and `sqrt` exactly (slow): what a kernel wants faster, it asks for here. The
//! host side computes the exactly rounded result, which lies within the stated error.

macro_rules! unary {
    ($(#[$doc:meta])* $name:ident, $ptx:literal, |$x:ident| $host:expr) => {
        $(#[$doc])*
        ///
        #[doc = concat!("`", $ptx, " d, a;`")]
        #[inline(always)]
        pub fn $name($x: f32) -> f32 {
            device!({
                let value: f32;
                // SAFETY: register arithmetic.
                unsafe {
                    core::arch::asm!(concat!($ptx, " {}, {};"), out(reg32) value, in(reg32) $x,
                        options(pure, nomem, nostack));
                }
                value
            } else {
                $host
            })
        }
    };
}

unary!(
    /// 2^x, error 2 ulp, subnormal results flushed to zero.
    ex2, "ex2.approx.ftz.f32", |x| (x as f64).exp2() as f32);
unary!(
    /// 2^x, error 2 ulp, subnormal results kept.
    ex2_subnormal, "ex2.approx.f32", |x| (x as f64).exp2() as f32);
unary!(
    /// log2(x), absolute error 2^-22 for x in (0.5, 2), relative 2^-22 elsewhere.
    lg2, "lg2.approx.ftz.f32", |x| (x as f64).log2() as f32);
unary!(
    /// 1/x, error 1 ulp, subnormals flushed.
    rcp, "rcp.approx.ftz.f32", |x| (1.0 / x as f64) as f32);
unary!(
    /// 1/sqrt(x), relative error 2^-22.9.
    rsqrt, "rsqrt.approx.f32", |x| (1.0 / (x as f64).sqrt()) as f32);
unary!(
    /// sqrt(x), exactly rounded.
    sqrt, "sqrt.rn.f32", |x| x.sqrt());
unary!(
    /// |x|.
    abs, "abs.f32", |x| x.abs());

/// a·b + c, rounded once. `fma.rn.f32 d, a, b, c;`
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    device!({
        let value: f32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("fma.rn.f32 {}, {}, {}, {};", out(reg32) value, in(reg32) a, in(reg32) b, in(reg32) c,
                options(pure, nomem, nostack));
        }
        value
    } else {
        a.mul_add(b, c)
    })
}

macro_rules! binary {
    ($(#[$doc:meta])* $name:ident, $ptx:literal, |$a:ident, $b:ident| $host:expr) => {
        $(#[$doc])*
        ///
        #[doc = concat!("`", $ptx, " d, a, b;`")]
        #[inline(always)]
        pub fn $name($a: f32, $b: f32) -> f32 {
            device!({
                let value: f32;
                // SAFETY: register arithmetic.
                unsafe {
                    core::arch::asm!(concat!($ptx, " {}, {}, {};"), out(reg32) value, in(reg32) $a, in(reg32) $b,
                        options(pure, nomem, nostack));
                }
                value
            } else {
                $host
            })
        }
    };
}

binary!(
    /// The larger; of a number and a NaN, the number.
    max, "max.f32", |a, b| a.max(b));
binary!(
    /// The smaller; of a number and a NaN, the number.
    min, "min.f32", |a, b| a.min(b));
binary!(
    /// a/b, exactly rounded.
    div, "div.rn.f32", |a, b| a / b);

/// log2(e): `exp(x) = ex2(x · LOG2_E)`.
pub const LOG2_E: f32 = core::f32::consts::LOG2_E;

/// e^x through [`ex2`]; the relative error grows with |x| by the rounding of `x·log2(e)`: 2 ulp + |x|·2^-24.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    ex2(x * LOG2_E)
}

/// x·sigmoid(x), finite for every finite x, and 0 for -inf.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    // sigmoid underflows to 0 below -88 while x stays finite: the product is then 0, its limit.
    let sigmoid = rcp(1.0 + exp(-x));
    if x == f32::NEG_INFINITY { 0.0 } else { x * sigmoid }
}

/// `dp4a.s32.s32 d, a, b, c;` c plus the dot product of four signed bytes of a and b, wrapping.
#[inline(always)]
pub fn dp4a(a: u32, b: u32, c: i32) -> i32 {
    device!({
        let value: i32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("dp4a.s32.s32 {}, {}, {}, {};", out(reg32) value, in(reg32) a, in(reg32) b, in(reg32) c,
                options(pure, nomem, nostack));
        }
        value
    } else {
        let products = core::iter::zip(a.to_le_bytes(), b.to_le_bytes());
        products.fold(c, |sum, (x, y)| sum.wrapping_add(i32::from(x as i8) * i32::from(y as i8)))
    })
}

/// The upper 32 bits of the 64-bit product. `mul.hi.u32 d, a, b;`
#[inline(always)]
pub fn mul_hi(a: u32, b: u32) -> u32 {
    ((u64::from(a) * u64::from(b)) >> 32) as u32
}

/// Float to integer, to nearest even, saturating at the ends of i8; NaN gives 0. `cvt.rni.sat.s8.f32`.
#[inline(always)]
pub fn round_i8(x: f32) -> i8 {
    device!({
        let value: i32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("cvt.rni.sat.s8.f32 {}, {};", out(reg32) value, in(reg32) x,
                options(pure, nomem, nostack));
        }
        value as i8
    } else {
        x.round_ties_even() as i8
    })
}
