//! Conversions and arithmetic, one value per thread.

use cuda_std::cvt::{self, Element, bf16, f16};
use cuda_std::{global, kernel, math, thread};

macro_rules! operations {
    ($($(#[$condition:meta])* $name:ident: |$a:ident, $b:ident, $c:ident| $result:expr;)*) => {
        /// What [`probe_operation`] computes of three words.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        #[allow(missing_docs)]
        pub enum Operation {
            $($name,)*
        }

        impl Operation {
            /// Every operation.
            pub const ALL: &[Operation] = &[$(Operation::$name,)*];
        }

        /// Three words of input and one of result to a thread. Parameter: the [`Operation`].
        #[kernel(max_threads = 256)]
        pub unsafe fn probe_operation(input: *const u32, output: *mut u32, _maps: *const u64, parameter: u32) {
            let i = (thread::block_idx_x() * thread::block_dim_x() + thread::thread_idx_x()) as usize;
            // SAFETY: the buffers are as documented.
            let [a, b, c] = unsafe { [0, 1, 2].map(|word| global::load(input.add(3 * i + word))) };
            let mut result = 0;
            $(
                $(#[$condition])*
                if parameter == Operation::$name as u32 {
                    let ($a, $b, $c) = (a, b, c);
                    let _ = ($a, $b, $c);
                    result = $result;
                }
            )*
            // SAFETY: the buffers are as documented.
            unsafe { global::store(output.add(i), result) };
        }
    };
}

#[inline(always)]
fn f(bits: u32) -> f32 {
    f32::from_bits(bits)
}

operations! {
    F16ToF32: |a, b, c| f16::from_bits(a as u16).to_f32_element().to_bits();
    Bf16ToF32: |a, b, c| bf16::from_bits(a as u16).to_f32_element().to_bits();
    F16FromF32: |a, b, c| <f16 as Element>::from_f32(f(a)).to_bits().into();
    Bf16FromF32: |a, b, c| <bf16 as Element>::from_f32(f(a)).to_bits().into();
    F16x2FromF32: |a, b, c| cvt::f16x2_from_f32(f(a), f(b));
    Bf16x2FromF32: |a, b, c| cvt::bf16x2_from_f32(f(a), f(b));
    E4m3x2FromF32: |a, b, c| cvt::e4m3x2_from_f32(f(a), f(b)).into();
    E5m2x2FromF32: |a, b, c| cvt::e5m2x2_from_f32(f(a), f(b)).into();
    E4m3x2FromF16x2: |a, b, c| cvt::e4m3x2_from_f16x2(a).into();
    E5m2x2FromF16x2: |a, b, c| cvt::e5m2x2_from_f16x2(a).into();
    F16x2FromE4m3x2: |a, b, c| cvt::f16x2_from_e4m3x2(a as u16);
    F16x2FromE4m3: |a, b, c| cvt::f16x2_from_e4m3::<1, 3>(a);
    Bf16x2FromE4m3: |a, b, c| cvt::bf16x2_from_e4m3::<0, 2>(a);
    F16x2FromE5m2x2: |a, b, c| cvt::f16x2_from_e5m2x2(a as u16);
    #[cfg(not(lacks_packed_math))]
    Bf16x2Fma: |a, b, c| cvt::bf16x2_fma(a, b, c);
    #[cfg(not(lacks_packed_math))]
    F16x2Fma: |a, b, c| cvt::f16x2_fma(a, b, c);
    Tf32FromF32: |a, b, c| cvt::tf32_from_f32(f(a));
    RoundI8: |a, b, c| math::round_i8(f(a)) as i32 as u32;
    Round: |a, b, c| math::round(f(a)).to_bits();
    Prmt: |a, b, c| cvt::prmt(a, b, c);
    Lop3AndOr: |a, b, c| cvt::lop3::<0xea>(a, b, c);
    Lop3Xor: |a, b, c| cvt::lop3::<0x96>(a, b, c);
    Dp4a: |a, b, c| math::dp4a(a, b, c as i32) as u32;
    MulHi: |a, b, c| math::mul_hi(a, b);
    Fma: |a, b, c| math::fma(f(a), f(b), f(c)).to_bits();
    Max: |a, b, c| math::max(f(a), f(b)).to_bits();
    Min: |a, b, c| math::min(f(a), f(b)).to_bits();
    Div: |a, b, c| math::div(f(a), f(b)).to_bits();
    Sqrt: |a, b, c| math::sqrt(f(a)).to_bits();
    Abs: |a, b, c| math::abs(f(a)).to_bits();
    Ex2: |a, b, c| math::ex2(f(a)).to_bits();
    Ex2Subnormal: |a, b, c| math::ex2_subnormal(f(a)).to_bits();
    Lg2: |a, b, c| math::lg2(f(a)).to_bits();
    Rcp: |a, b, c| math::rcp(f(a)).to_bits();
    Rsqrt: |a, b, c| math::rsqrt(f(a)).to_bits();
    Sin: |a, b, c| math::sin(f(a)).to_bits();
    Cos: |a, b, c| math::cos(f(a)).to_bits();
    #[cfg(not(lacks_packed_math))]
    Tanh: |a, b, c| math::tanh(f(a)).to_bits();
    Exp: |a, b, c| math::exp(f(a)).to_bits();
    Silu: |a, b, c| math::silu(f(a)).to_bits();
}

/// `Element::to_f32` beside the inherent functions of the same name, which are software on the device.
trait ToF32 {
    fn to_f32_element(self) -> f32;
}

impl<T: Element> ToF32 for T {
    #[inline(always)]
    fn to_f32_element(self) -> f32 {
        Element::to_f32(self)
    }
}
