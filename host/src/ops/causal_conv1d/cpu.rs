//! The convolution on the CPU: sequence by sequence, tokens in parallel.

use abi::DType;
use abi::ops::causal_conv1d::CausalConv1dDims;
use half::{bf16, f16};

use super::CausalConv1dArgs;
use crate::ops::glu::silu;
use crate::ops::packed::sequence;
use crate::ops::parallel::{SharedSlice, for_rows};
use crate::tensor::FloatElement;

pub(super) fn run(dtype: DType, dims: &CausalConv1dDims, args: &mut CausalConv1dArgs<'_>) {
    match dtype {
        DType::F16 => sequences::<f16>(dims, args),
        DType::BF16 => sequences::<bf16>(dims, args),
        _ => sequences::<f32>(dims, args),
    }
}

fn sequences<T: FloatElement>(dims: &CausalConv1dDims, args: &mut CausalConv1dArgs<'_>) {
    let (channels, width) = (dims.channels as usize, dims.width as usize);
    let past = width - 1;
    let (x, weight) = (args.x.host_slice::<T>(), args.weight.host_slice::<T>());
    let bias = args.bias.as_ref().map(|bias| bias.host_slice::<T>());
    let (offsets, slots) = (args.offsets.host_slice::<u32>(), args.slots.host_slice::<u32>());
    let state = args.state.host_slice_mut::<T>();
    let out = SharedSlice::new(args.out.host_slice_mut::<T>());
    for (index, &slot) in slots.iter().enumerate().filter(|&(_, &slot)| slot < dims.num_slots) {
        let tokens = sequence(offsets, index, dims.tokens);
        let state = &mut state[slot as usize * dims.slot_stride as usize..][..channels * past];
        let old = &*state;
        // Input `age` tokens before token t of the sequence, or of the state.
        let input = |t: usize, age: usize, channel: usize| match t.checked_sub(age) {
            Some(t) => x[(tokens.start + t) * dims.x_stride as usize + channel],
            None => old[channel * past + past + t - age],
        };
        for_rows(tokens.len(), tokens.len() * channels, |t| {
            // SAFETY: rows of distinct tokens do not overlap.
            let out = unsafe { out.part((tokens.start + t) * dims.out_stride as usize, channels) };
            for (channel, out) in out.iter_mut().enumerate() {
                let taps = &weight[channel * width..][..width];
                let bias = bias.map_or(0.0, |bias| bias[channel].to_f32());
                let product = |(j, tap): (usize, &T)| tap.to_f32() * input(t, past - j, channel).to_f32();
                *out = T::from_f32(silu(bias + taps.iter().enumerate().map(product).sum::<f32>()));
            }
        });
        let next: Vec<T> =
            (0..channels * past).map(|at| input(tokens.len(), past - at % past, at / past)).collect();
        state.copy_from_slice(&next);
    }
}
