//! Against candle's own operators: of the same inputs in f32, so that a result may differ by the order of its sums and
//! by one rounding to its type.

use candle_core::quantized::{GgmlDType, QTensor};
use candle_core::{DType, Device, IndexOp, Module, Result, Tensor};
use warpforge_candle::{
    Activation, Attention, Glu, QuantisedMatmul, Rope, RopeStyle, Scheme, attention, matmul, rmsnorm, swiglu,
};

use crate::device;

const TYPES: [DType; 3] = [DType::F32, DType::F16, DType::BF16];

/// Numbers around 0, of a type, the same for the same seed.
fn drawn(seed: u64, shape: &[usize], dtype: DType) -> Tensor {
    let len: usize = shape.iter().product();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let values: Vec<f32> = (0..len)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect();
    Tensor::from_vec(values, shape, &device()).unwrap().to_dtype(dtype).unwrap()
}

/// In f32 on the CPU, where candle is to say what is right.
fn wide(x: &Tensor) -> Tensor {
    x.to_device(&Device::Cpu).unwrap().to_dtype(DType::F32).unwrap()
}

/// Whether `got` is `wanted`, which is in f32, within `sums` of what is summed and half a unit of its own type.
#[track_caller]
fn assert_close(got: &Tensor, wanted: &Tensor, sums: f32) {
    assert_eq!(got.dims(), wanted.dims());
    let rounding = match got.dtype() {
        DType::F32 => 0.0,
        DType::F16 => 2f32.powi(-11),
        _ => 2f32.powi(-8),
    };
    let values = |x: &Tensor| wide(x).flatten_all().unwrap().to_vec1::<f32>().unwrap();
    for (i, (got, wanted)) in values(got).into_iter().zip(values(wanted)).enumerate() {
        // Below the normal numbers of f16 a unit does not shrink further.
        let bound = sums
            + rounding * wanted.abs() * 1.01
            + if rounding == 2f32.powi(-11) { 2f32.powi(-25) } else { 0.0 };
        assert!((got - wanted).abs() <= bound, "{i}: {got} for {wanted}, bound {bound}");
    }
}

#[test]
fn rmsnorm_agrees() -> Result<()> {
    for dtype in TYPES {
        for shape in [&[3, 40][..], &[2, 5, 64], &[1, 2, 3, 33], &[1, 1, 2, 1, 2, 16], &[4, 1], &[0, 8]] {
            // Candle makes no tensors without elements on a card.
            if shape.contains(&0) && !device().is_cpu() {
                continue;
            }
            let cols = *shape.last().unwrap();
            let (x, weight) = (drawn(1, shape, dtype), drawn(2, &[cols], dtype));
            let wanted = candle_nn::ops::rms_norm_slow(&wide(&x), &wide(&weight), 1e-5)?;
            assert_close(&rmsnorm(&x, &weight, 1e-5)?, &wanted, 4e-6);
        }
        // Rows with gaps, rows that are transposed, a part from the middle.
        let x = drawn(3, &[6, 4, 32], dtype);
        for part in [x.i((.., 1, ..))?, x.transpose(0, 1)?, x.transpose(1, 2)?, x.narrow(2, 8, 16)?, x.i(2)?]
        {
            let weight = drawn(4, &[*part.dims().last().unwrap()], dtype);
            let wanted = candle_nn::ops::rms_norm_slow(&wide(&part).contiguous()?, &wide(&weight), 1e-5)?;
            assert_close(&rmsnorm(&part, &weight, 1e-5)?, &wanted, 4e-6);
        }
    }
    Ok(())
}

#[test]
fn swiglu_agrees() -> Result<()> {
    for dtype in TYPES {
        let joint = drawn(5, &[2, 3, 96], dtype);
        let (gate, up) = (joint.narrow(2, 0, 48)?, joint.narrow(2, 48, 48)?);
        let wanted = (candle_nn::ops::silu(&wide(&gate))? * wide(&up))?;
        assert_close(&swiglu(&gate, &up)?, &wanted, 1e-6);
        let wanted = (wide(&gate).gelu_erf()? * wide(&up))?;
        assert_close(&gate.apply_op2(&up, Glu { activation: Activation::GeluErf })?, &wanted, 1e-6);
    }
    Ok(())
}

#[test]
fn rope_agrees() -> Result<()> {
    let (batch, heads, tokens, dim) = (2, 3, 5, 16);
    for dtype in TYPES {
        for (style, interleaved) in [(RopeStyle::HalfSplit, false), (RopeStyle::Interleaved, true)] {
            let rope = Rope::of_theta(1e4, dim, 64, style)?;
            let positions = Tensor::arange(7u32, 7 + tokens as u32, &Device::Cpu)?;
            let inv_freq: Vec<f32> =
                (0..dim / 2).map(|i| 1e4f32.powf(-2.0 * i as f32 / dim as f32)).collect();
            let inv_freq = Tensor::from_vec(inv_freq, (1, dim / 2), &Device::Cpu)?;
            let angles = positions.to_dtype(DType::F32)?.unsqueeze(1)?.matmul(&inv_freq)?;
            let (cos, sin) = (angles.cos()?, angles.sin()?);
            // As projections give them: tokens outside of heads.
            let x = drawn(6, &[batch, tokens, heads, dim], dtype).transpose(1, 2)?;
            let dense = wide(&x).contiguous()?;
            let wanted = match interleaved {
                true => candle_nn::rotary_emb::rope_i(&dense, &cos, &sin)?,
                false => candle_nn::rotary_emb::rope(&dense, &cos, &sin)?,
            };
            let positions = positions.to_device(&device())?;
            assert_close(&rope.apply(&x, &positions)?, &wanted, 4e-6);
            let each = positions.unsqueeze(0)?.broadcast_as((batch, tokens))?;
            assert_close(&rope.apply(&x, &each)?, &wanted, 4e-6);
        }
    }
    if !device().is_cpu() {
        // Of positions on a card those beyond the tables count as their last.
        return Ok(());
    }
    let rope = Rope::of_theta(1e4, 16, 64, RopeStyle::HalfSplit)?;
    let beyond = Tensor::new(&[64u32], &Device::Cpu)?;
    let error = rope.apply(&drawn(7, &[1, 1, 1, 16], DType::F32), &beyond).unwrap_err().to_string();
    assert!(error.contains("positions that the tables have, got [64]"), "{error}");
    Ok(())
}

/// Candle's operators one after the other, heads repeated.
fn naive(q: &Tensor, k: &Tensor, v: &Tensor, how: Attention) -> Result<Tensor> {
    let (q, k, v) = (wide(q).contiguous()?, wide(k).contiguous()?, wide(v).contiguous()?);
    let (_, heads, tokens, dim) = q.dims4()?;
    let (batch, kv_heads, keys, dim_v) = v.dims4()?;
    let repeat = |x: &Tensor, dim: usize| -> Result<Tensor> {
        let shape = (batch, kv_heads, heads / kv_heads, keys, dim);
        x.unsqueeze(2)?.broadcast_as(shape)?.contiguous()?.reshape((batch, heads, keys, dim))
    };
    let (k, v) = (repeat(&k, dim)?, repeat(&v, dim_v)?);
    let mut scores = (q.matmul(&k.t()?)? * f64::from(how.scale.unwrap_or(1.0 / (dim as f32).sqrt())))?;
    if let Some(cap) = how.soft_cap {
        scores = ((scores / f64::from(cap))?.tanh()? * f64::from(cap))?;
    }
    let hidden = |i: usize, j: usize| {
        let place = i + keys - tokens;
        how.causal && j > place || how.window.is_some_and(|window| j + window <= place)
    };
    let mask: Vec<f32> = (0..tokens * keys)
        .map(|at| if hidden(at / keys, at % keys) { f32::NEG_INFINITY } else { 0.0 })
        .collect();
    let scores = scores.broadcast_add(&Tensor::from_vec(mask, (tokens, keys), &Device::Cpu)?)?;
    candle_nn::ops::softmax_last_dim(&scores)?.matmul(&v)
}

#[test]
fn attention_agrees() -> Result<()> {
    for dtype in TYPES {
        // On tensor cores the softmax's weights are rounded to the type, as v is, whose magnitudes are below 1.
        let weights = match dtype {
            DType::F16 if !device().is_cpu() => 2f32.powi(-11),
            DType::BF16 if !device().is_cpu() => 2f32.powi(-8),
            _ => 0.0,
        };
        for (batch, heads, kv_heads, tokens, keys, dim, dim_v) in [
            (1, 1, 1, 1, 1, 8, 8),
            (2, 4, 2, 5, 9, 16, 16),
            (1, 6, 2, 3, 40, 64, 32),
            (2, 3, 1, 7, 7, 24, 24),
        ] {
            // As projections give them, but for v.
            let q = drawn(8, &[batch, tokens, heads, dim], dtype).transpose(1, 2)?;
            let k = drawn(9, &[batch, keys, kv_heads, dim], dtype).transpose(1, 2)?;
            let v = drawn(10, &[batch, kv_heads, keys, dim_v], dtype);
            for how in [
                Attention::default(),
                Attention::causal(),
                Attention { scale: Some(0.5), window: Some(3), ..Attention::causal() },
                Attention { soft_cap: Some(2.0), ..Attention::default() },
            ] {
                assert_close(&attention(&q, &k, &v, how)?, &naive(&q, &k, &v, how)?, 2e-6 + weights);
            }
        }
    }
    Ok(())
}

#[test]
fn matmul_agrees() -> Result<()> {
    for dtype in TYPES {
        for (m, n, k) in [(1, 1, 1), (3, 5, 7), (33, 20, 64), (2, 300, 128)] {
            let bound = k as f32 * 2e-7 + 1e-7;
            let (a, weight) = (drawn(11, &[m, k], dtype), drawn(12, &[n, k], dtype));
            let wanted = wide(&a).matmul(&wide(&weight).t()?.contiguous()?)?;
            assert_close(&matmul(&a, &weight.t()?)?, &wanted, bound);
            assert_close(&matmul(&a, &weight.t()?.contiguous()?)?, &wanted, bound);
            assert_close(&matmul(&a.t()?.contiguous()?.t()?, &weight.t()?)?, &wanted, bound);
            // A batch with one weight, and with one each.
            let a = drawn(13, &[2, 3, m, k], dtype);
            let one = wide(&a).broadcast_matmul(&wide(&weight).t()?.contiguous()?)?;
            assert_close(&matmul(&a, &weight.t()?)?, &one, bound);
            let each = drawn(14, &[2, 3, k, n], dtype);
            assert_close(&matmul(&a, &each)?, &wide(&a).matmul(&wide(&each))?, bound);
            let (a, each) = (a.transpose(0, 1)?, each.transpose(0, 1)?);
            let wanted = wide(&a).contiguous()?.matmul(&wide(&each).contiguous()?)?;
            assert_close(&matmul(&a, &each)?, &wanted, bound);
        }
    }
    Ok(())
}

/// Against the product with what candle makes of the quantised weight.
#[test]
fn quantised_products_agree() -> Result<()> {
    const BLOCKS_OF_32: [GgmlDType; 5] =
        [GgmlDType::Q4_0, GgmlDType::Q4_1, GgmlDType::Q5_0, GgmlDType::Q5_1, GgmlDType::Q8_0];
    const BLOCKS_OF_256: [GgmlDType; 3] = [GgmlDType::Q4K, GgmlDType::Q5K, GgmlDType::Q6K];
    let n = 24;
    for (dtype, (k, kinds)) in TYPES
        .into_iter()
        .flat_map(|dtype| [(96, &BLOCKS_OF_32[..]), (512, &BLOCKS_OF_256)].map(|kinds| (dtype, kinds)))
    {
        let weight = drawn(15, &[n, k], DType::F32);
        let x = drawn(16, &[2, 3, k], dtype);
        for &of in kinds {
            let quantised = QTensor::quantize(&weight, of)?;
            let wanted =
                wide(&x).broadcast_matmul(&quantised.dequantize(&Device::Cpu)?.t()?.contiguous()?)?;
            let layer = QuantisedMatmul::from_qtensor(&quantised)?;
            assert_eq!((layer.weight().n(), layer.weight().k()), (n, k));
            assert_close(&layer.forward(&x)?, &wanted, 2e-5);
            // Many rows go by another way: on a card their weights are unpacked, which rounds them to the type.
            let unpacked = if device().is_cpu() { DType::F32 } else { dtype };
            let unpacked = wide(&quantised.dequantize(&Device::Cpu)?.to_dtype(unpacked)?);
            let many = drawn(17, &[70, k], dtype);
            let wanted = wide(&many).matmul(&unpacked.t()?.contiguous()?)?;
            assert_close(&layer.forward(&many)?, &wanted, if dtype == DType::F32 { 2e-5 } else { 4e-2 });
        }
        let wanted = wide(&x).broadcast_matmul(&wide(&weight).t()?.contiguous()?)?;
        // Half a step of 1 / 127 in each of the products of at most 1.
        let layer = QuantisedMatmul::quantise(&weight, Scheme::INT8)?;
        assert_close(&layer.forward(&x)?, &wanted, 0.5 / 127.0 * k as f32);
    }
    let error =
        QuantisedMatmul::from_qtensor(&QTensor::quantize(&drawn(1, &[2, 256], DType::F32), GgmlDType::Q2K)?);
    assert!(error.unwrap_err().to_string().contains("Q2K: expected Q4_0, Q4_1"));
    Ok(())
}

#[test]
fn what_does_not_fit_is_an_error() -> Result<()> {
    let x = drawn(18, &[2, 3, 16], DType::F32);
    let message = |result: Result<Tensor>| result.unwrap_err().to_string();
    let short = message(rmsnorm(&x, &drawn(19, &[15], DType::F32), 1e-6));
    assert!(short.contains("rmsnorm: weight: expected shape [16], got [15]"), "{short}");
    let wrong = message(rmsnorm(&x, &drawn(19, &[16], DType::F16), 1e-6));
    assert!(wrong.contains("expected f32, got f16"), "{wrong}");
    let double = message(rmsnorm(&x.to_dtype(DType::F64)?, &drawn(19, &[16], DType::F32), 1e-6));
    assert!(double.contains("warpforge-rmsnorm: x: expected f32, f16, bf16 or u32, got F64"), "{double}");
    let scalar = message(rmsnorm(&Tensor::new(1f32, &device())?, &drawn(19, &[1], DType::F32), 1e-6));
    assert!(scalar.contains("more axes"), "{scalar}");
    assert!(
        message(swiglu(&x, &drawn(1, &[2, 3, 8], DType::F32))).contains("the gate's shape, got [2, 3, 8]")
    );
    assert!(message(matmul(&x, &x)).contains("as many rows as a has columns"));
    assert!(message(matmul(&x, &drawn(1, &[3, 16, 2], DType::F32))).contains("a's leading axes"));
    assert!(
        message(attention(&x, &x, &x, Attention::default())).contains("[batch, heads, tokens, head_dim]")
    );
    let q = drawn(20, &[1, 3, 2, 8], DType::F32);
    let kv = drawn(20, &[1, 2, 2, 8], DType::F32);
    assert!(message(attention(&q, &kv, &kv, Attention::default())).starts_with("attention: "));
    Ok(())
}

/// There are no gradients, and candle says so.
#[test]
fn no_gradient() -> Result<()> {
    let x = candle_core::Var::from_tensor(&drawn(21, &[2, 16], DType::F32))?;
    let loss = rmsnorm(&x, &drawn(22, &[16], DType::F32), 1e-6)?.sum_all()?;
    assert!(loss.backward().unwrap_err().to_string().contains("warpforge-rmsnorm"));
    Ok(())
}
