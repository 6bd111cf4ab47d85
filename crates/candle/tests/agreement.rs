//! Operators on candle's tensors of the CPU. `examples/beside_candle` has the same tests on a card.

mod operators;

use candle_core::Device;

fn device() -> Device {
    Device::Cpu
}

/// Of another device than the operators are built for.
#[cfg(not(feature = "cuda"))]
#[test]
fn cuda_is_refused() {
    use candle_core::{CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Tensor};
    use warpforge_candle::{Attention, Matmul, QuantisedMatmul, RmsNorm, Scheme};

    let (storage, layout) = (CudaStorage, Layout::contiguous(4));
    let norm = RmsNorm { eps: 1e-6, weight: Default::default() };
    let two = norm.cuda_fwd(&storage, &layout, &storage, &layout).unwrap_err().to_string();
    assert_eq!(
        two,
        "warpforge-rmsnorm takes no tensors on CUDA as it is built: bring them to the CPU by `to_device(&Device::Cpu)`"
    );
    let three =
        Attention::default().cuda_fwd(&storage, &layout, &storage, &layout, &storage, &layout).unwrap_err();
    assert!(
        matches!(three, candle_core::Error::Cuda(_)) && three.to_string().contains("warpforge-attention")
    );
    assert!(Matmul.cuda_fwd(&storage, &layout, &storage, &layout).is_err());
    let layer =
        QuantisedMatmul::quantise(&Tensor::ones((8, 64), DType::F32, &Device::Cpu).unwrap(), Scheme::INT4)
            .unwrap();
    assert!(layer.cuda_fwd(&storage, &layout).is_err());
}
