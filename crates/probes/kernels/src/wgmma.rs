//! `wgmma`: every type, both places of a, every major, four N. Blocks of 128 threads.

use cuda_std::cvt::E4m3;
use cuda_std::wgmma::{
    Accumulate, Descriptor, KMajor, Major, MnMajor, Registers, Swizzle, commit_group, rs, ss, wait_group,
};
use cuda_std::{fence, kernel, shared, thread};
use half::{bf16, f16};

use crate::{load, store};

/// Words before the accumulators: for a and b byte offset, swizzle (0 to 3 for none, 32, 64, 128 bytes), leading and
/// stride bytes; then whether to add, and the words of shared memory.
pub const HEAD_WORDS: u32 = 10;

/// A value of 32 bits as an accumulator, and back.
trait Word: Copy {
    const ZERO: Self;
    fn from_word(word: u32) -> Self;
    fn to_word(self) -> u32;
}

impl Word for f32 {
    const ZERO: Self = 0.0;
    #[inline(always)]
    fn from_word(word: u32) -> Self {
        f32::from_bits(word)
    }
    #[inline(always)]
    fn to_word(self) -> u32 {
        self.to_bits()
    }
}

impl Word for i32 {
    const ZERO: Self = 0;
    #[inline(always)]
    fn from_word(word: u32) -> Self {
        word as i32
    }
    #[inline(always)]
    fn to_word(self) -> u32 {
        self as u32
    }
}

/// A descriptor from four words of the input.
///
/// # Safety
/// The input has them.
#[inline(always)]
unsafe fn descriptor<M: Major>(input: *const u32, words: u32, first: u32) -> Descriptor<M> {
    // SAFETY: the caller's promise.
    let [offset, swizzle, leading, stride] = unsafe { [0, 1, 2, 3].map(|i| load(input, words, first + i)) };
    let swizzle = match swizzle {
        0 => Swizzle::None,
        1 => Swizzle::Bytes32,
        2 => Swizzle::Bytes64,
        _ => Swizzle::Bytes128,
    };
    Descriptor::new(shared::base() + offset, swizzle, leading, stride)
}

/// The whole kernel but for the instruction.
///
/// # Safety
/// The buffers are as [`HEAD_WORDS`] and the modules' text say.
#[inline(always)]
unsafe fn probe<T: Word, const R: usize, A: Major, B: Major>(
    input: *const u32,
    output: *mut u32,
    words: u32,
    multiply: impl Fn(&mut [T; R], Descriptor<A>, Descriptor<B>, [u32; 4], Accumulate),
) where
    [T; R]: Registers,
{
    let thread = thread::thread_idx_x();
    let registers = R as u32;
    // SAFETY: the caller's promise; the fence and the barrier hand shared memory to the instruction.
    unsafe {
        let num_image = load(input, words, 9);
        let image = HEAD_WORDS + 128 * registers + 512;
        let mut i = thread;
        while i < num_image {
            shared::store_u32(shared::base() + 4 * i, load(input, words, image + i));
            i += 128;
        }
        fence::proxy_async_shared();
        thread::sync_threads();
        let (a, b) = (descriptor(input, words, 0), descriptor(input, words, 4));
        let accumulate = if load(input, words, 8) == 0 { Accumulate::Overwrite } else { Accumulate::Add };
        let in_registers =
            [0, 1, 2, 3].map(|i| load(input, words, HEAD_WORDS + 128 * registers + 4 * thread + i));
        let mut d = [T::ZERO; R];
        let mut i = 0;
        while i < R {
            d[i] = T::from_word(load(input, words, HEAD_WORDS + registers * thread + i as u32));
            i += 1;
        }
        cuda_std::wgmma::fence();
        multiply(&mut d, a, b, in_registers, accumulate);
        commit_group();
        wait_group::<0>(&mut d);
        let mut i = 0;
        while i < R {
            store(output, 128 * registers, registers * thread + i as u32, d[i].to_word());
            i += 1;
        }
    }
}

macro_rules! shared_a {
    ($($name:ident: $type:ty, $word:ty, $r:literal, $a:ty, $b:ty;)*) => {
        $(
            /// Input of a block: [`HEAD_WORDS`], the accumulators of each thread, four words of a for each, and shared
            /// memory. Results: the accumulators. Parameter: words of a block's input.
            #[kernel(max_threads = 128)]
            pub unsafe fn $name(input: *const u32, output: *mut u32, _maps: *const u64, parameter: u32) {
                // SAFETY: the buffers are as documented; all 128 threads take part.
                unsafe {
                    probe::<$word, $r, $a, $b>(input, output, parameter, |d, a, b, _, accumulate| {
                        ss::<$type, _, _, _>(d, a, b, accumulate)
                    });
                }
            }
        )*
    };
}

macro_rules! registers_a {
    ($($name:ident: $type:ty, $word:ty, $r:literal, $b:ty;)*) => {
        $(
            /// As the others, with a from registers.
            #[kernel(max_threads = 128)]
            pub unsafe fn $name(input: *const u32, output: *mut u32, _maps: *const u64, parameter: u32) {
                // SAFETY: the buffers are as documented; all 128 threads take part.
                unsafe {
                    probe::<$word, $r, KMajor, $b>(input, output, parameter, |d, _, b, a, accumulate| {
                        rs::<$type, _, _>(d, a, b, accumulate)
                    });
                }
            }
        )*
    };
}

shared_a! {
    wgmma_bf16_ss_k_k_n8: bf16, f32, 4, KMajor, KMajor;
    wgmma_bf16_ss_k_mn_n8: bf16, f32, 4, KMajor, MnMajor;
    wgmma_bf16_ss_mn_k_n8: bf16, f32, 4, MnMajor, KMajor;
    wgmma_bf16_ss_mn_mn_n8: bf16, f32, 4, MnMajor, MnMajor;
    wgmma_bf16_ss_k_k_n64: bf16, f32, 32, KMajor, KMajor;
    wgmma_bf16_ss_k_mn_n64: bf16, f32, 32, KMajor, MnMajor;
    wgmma_bf16_ss_mn_k_n64: bf16, f32, 32, MnMajor, KMajor;
    wgmma_bf16_ss_mn_mn_n64: bf16, f32, 32, MnMajor, MnMajor;
    wgmma_bf16_ss_k_k_n128: bf16, f32, 64, KMajor, KMajor;
    wgmma_bf16_ss_k_mn_n128: bf16, f32, 64, KMajor, MnMajor;
    wgmma_bf16_ss_mn_k_n128: bf16, f32, 64, MnMajor, KMajor;
    wgmma_bf16_ss_mn_mn_n128: bf16, f32, 64, MnMajor, MnMajor;
    wgmma_bf16_ss_k_k_n256: bf16, f32, 128, KMajor, KMajor;
    wgmma_bf16_ss_k_mn_n256: bf16, f32, 128, KMajor, MnMajor;
    wgmma_bf16_ss_mn_k_n256: bf16, f32, 128, MnMajor, KMajor;
    wgmma_bf16_ss_mn_mn_n256: bf16, f32, 128, MnMajor, MnMajor;
    wgmma_f16_ss_k_k_n8: f16, f32, 4, KMajor, KMajor;
    wgmma_f16_ss_k_mn_n8: f16, f32, 4, KMajor, MnMajor;
    wgmma_f16_ss_mn_k_n8: f16, f32, 4, MnMajor, KMajor;
    wgmma_f16_ss_mn_mn_n8: f16, f32, 4, MnMajor, MnMajor;
    wgmma_f16_ss_k_k_n64: f16, f32, 32, KMajor, KMajor;
    wgmma_f16_ss_k_mn_n64: f16, f32, 32, KMajor, MnMajor;
    wgmma_f16_ss_mn_k_n64: f16, f32, 32, MnMajor, KMajor;
    wgmma_f16_ss_mn_mn_n64: f16, f32, 32, MnMajor, MnMajor;
    wgmma_f16_ss_k_k_n128: f16, f32, 64, KMajor, KMajor;
    wgmma_f16_ss_k_mn_n128: f16, f32, 64, KMajor, MnMajor;
    wgmma_f16_ss_mn_k_n128: f16, f32, 64, MnMajor, KMajor;
    wgmma_f16_ss_mn_mn_n128: f16, f32, 64, MnMajor, MnMajor;
    wgmma_f16_ss_k_k_n256: f16, f32, 128, KMajor, KMajor;
    wgmma_f16_ss_k_mn_n256: f16, f32, 128, KMajor, MnMajor;
    wgmma_f16_ss_mn_k_n256: f16, f32, 128, MnMajor, KMajor;
    wgmma_f16_ss_mn_mn_n256: f16, f32, 128, MnMajor, MnMajor;
    wgmma_tf32_ss_k_k_n8: f32, f32, 4, KMajor, KMajor;
    wgmma_tf32_ss_k_k_n64: f32, f32, 32, KMajor, KMajor;
    wgmma_tf32_ss_k_k_n128: f32, f32, 64, KMajor, KMajor;
    wgmma_tf32_ss_k_k_n256: f32, f32, 128, KMajor, KMajor;
    wgmma_e4m3_ss_k_k_n8: E4m3, f32, 4, KMajor, KMajor;
    wgmma_e4m3_ss_k_k_n64: E4m3, f32, 32, KMajor, KMajor;
    wgmma_e4m3_ss_k_k_n128: E4m3, f32, 64, KMajor, KMajor;
    wgmma_e4m3_ss_k_k_n256: E4m3, f32, 128, KMajor, KMajor;
    wgmma_s8_ss_k_k_n8: i8, i32, 4, KMajor, KMajor;
    wgmma_s8_ss_k_k_n64: i8, i32, 32, KMajor, KMajor;
    wgmma_s8_ss_k_k_n128: i8, i32, 64, KMajor, KMajor;
    wgmma_s8_ss_k_k_n256: i8, i32, 128, KMajor, KMajor;
}

registers_a! {
    wgmma_bf16_rs_k_n8: bf16, f32, 4, KMajor;
    wgmma_bf16_rs_mn_n8: bf16, f32, 4, MnMajor;
    wgmma_bf16_rs_k_n64: bf16, f32, 32, KMajor;
    wgmma_bf16_rs_mn_n64: bf16, f32, 32, MnMajor;
    wgmma_bf16_rs_k_n128: bf16, f32, 64, KMajor;
    wgmma_bf16_rs_mn_n128: bf16, f32, 64, MnMajor;
    wgmma_bf16_rs_k_n256: bf16, f32, 128, KMajor;
    wgmma_bf16_rs_mn_n256: bf16, f32, 128, MnMajor;
    wgmma_f16_rs_k_n8: f16, f32, 4, KMajor;
    wgmma_f16_rs_mn_n8: f16, f32, 4, MnMajor;
    wgmma_f16_rs_k_n64: f16, f32, 32, KMajor;
    wgmma_f16_rs_mn_n64: f16, f32, 32, MnMajor;
    wgmma_f16_rs_k_n128: f16, f32, 64, KMajor;
    wgmma_f16_rs_mn_n128: f16, f32, 64, MnMajor;
    wgmma_f16_rs_k_n256: f16, f32, 128, KMajor;
    wgmma_f16_rs_mn_n256: f16, f32, 128, MnMajor;
    wgmma_tf32_rs_k_n8: f32, f32, 4, KMajor;
    wgmma_tf32_rs_k_n64: f32, f32, 32, KMajor;
    wgmma_tf32_rs_k_n128: f32, f32, 64, KMajor;
    wgmma_tf32_rs_k_n256: f32, f32, 128, KMajor;
    wgmma_e4m3_rs_k_n8: E4m3, f32, 4, KMajor;
    wgmma_e4m3_rs_k_n64: E4m3, f32, 32, KMajor;
    wgmma_e4m3_rs_k_n128: E4m3, f32, 64, KMajor;
    wgmma_e4m3_rs_k_n256: E4m3, f32, 128, KMajor;
    wgmma_s8_rs_k_n8: i8, i32, 4, KMajor;
    wgmma_s8_rs_k_n64: i8, i32, 32, KMajor;
    wgmma_s8_rs_k_n128: i8, i32, 64, KMajor;
    wgmma_s8_rs_k_n256: i8, i32, 128, KMajor;
}
