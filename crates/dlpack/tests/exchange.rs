//! Round trips of any shape and strides, what is refused, and that each tensor is released once.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dlpark::ffi::{DLDataType, DLDevice, DLManagedTensor, DLManagedTensorVersioned};
use dlpark::metadata::Dynamic;
use dlpark::{DlpackFlags, Managed, ManagedTensorBase};
use half::{bf16, f16};
use host::ops::copy::{Copy, CopyArgs, CopyProblem};
use host::{DType, Device, Element, F8E4M3, Place, Stream, Tensor, TensorView};
use proptest::prelude::*;
use warpforge_dlpack::{DlpackError, DlpackTensor, dlpark, from_dlpack, share, to_dlpack, to_legacy_dlpack};

fn cpu() -> Stream {
    Device::cpu().stream().expect("a stream of the CPU")
}

/// The elements of a view with any strides, in order, by warpforge's own copy: of four dimensions at a time.
fn gathered<T: Element>(stream: &Stream, view: TensorView<'_>) -> Vec<T> {
    let parts = if view.shape().len() > 4 { view.shape()[0] } else { 1 };
    let part = |i| if view.shape().len() > 4 { view.slice(0, i..i + 1).unwrap() } else { view };
    let copy = Copy::plan(stream.device(), CopyProblem::new(view.len(), T::DTYPE, T::DTYPE)).unwrap();
    let gather = |view: TensorView<'_>| {
        let mut dense = Tensor::empty(stream, view.shape(), T::DTYPE).unwrap();
        copy.run(stream, CopyArgs::new(view, dense.view_mut())).unwrap();
        dense.to_vec(stream).unwrap()
    };
    (0..parts).flat_map(|i| gather(part(i))).collect()
}

/// Counts its drops.
struct Counted {
    drops: Arc<AtomicUsize>,
    bytes: Vec<u64>,
}

/// A tensor as another library would make it.
#[derive(Clone, Debug)]
struct Foreign {
    shape: Vec<i64>,
    strides: Vec<i64>,
    dtype: DLDataType,
    device: DLDevice,
    byte_offset: u64,
    is_null: bool,
    flags: DlpackFlags,
}

impl Foreign {
    fn f32(shape: &[i64], strides: &[i64]) -> Self {
        Foreign {
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            dtype: DLDataType::F32,
            device: DLDevice::CPU,
            byte_offset: 0,
            is_null: false,
            flags: DlpackFlags::empty(),
        }
    }

    /// With room for 64 elements of 8 bytes, the numbers from 0 on as f32 at the beginning.
    fn make<M: ManagedTensorBase>(&self, drops: &Arc<AtomicUsize>) -> Managed<M> {
        let pair = |i: u64| {
            u64::from((2.0 * i as f32).to_bits()) | u64::from((2.0 * i as f32 + 1.0).to_bits()) << 32
        };
        let mut counted = Box::new(Counted { drops: drops.clone(), bytes: (0..64).map(pair).collect() });
        let data =
            if self.is_null { std::ptr::null_mut() } else { counted.bytes.as_mut_ptr().cast::<c_void>() };
        let prepared = Dynamic::new(&self.shape[..], &self.strides[..]).prepare_as::<M>().unwrap();
        let mut tensor = prepared.initialize(counted);
        tensor.set_data(data).set_dtype(self.dtype).set_device(self.device).set_byte_offset(self.byte_offset);
        // SAFETY: the flags of these tests forbid, and promise nothing.
        unsafe { tensor.set_flags_unchecked(self.flags) };
        // SAFETY: the context owns the memory; what is wrong of the rest is to be refused.
        unsafe { tensor.finish() }
    }

    /// What becomes of it in both layouts, each released once.
    fn imported(&self) -> Result<Vec<f32>, DlpackError> {
        let drops = Arc::new(AtomicUsize::new(0));
        let stream = cpu();
        let read = |tensor: DlpackTensor| gathered(&stream, tensor.view());
        // SAFETY: true where it is not refused: within 64 elements of 8 bytes, and nobody else's.
        let first = unsafe { from_dlpack(&stream, self.make::<DLManagedTensorVersioned>(&drops)) }.map(read);
        assert_eq!(drops.load(Ordering::Relaxed), 1, "{self:?}");
        // SAFETY: as above.
        let second = unsafe { from_dlpack(&stream, self.make::<DLManagedTensor>(&drops)) }.map(read);
        assert_eq!(drops.load(Ordering::Relaxed), 2, "{self:?}");
        assert_eq!(format!("{first:?}"), format!("{second:?}"));
        first
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.drops.fetch_add(1, Ordering::Relaxed);
    }
}

#[test]
fn every_type_comes_back() {
    fn check<T: Element>(values: [T; 6]) {
        let stream = cpu();
        let before = stream.device().pool().stats().num_live;
        let tensor = Tensor::from_slice(&stream, &[2, 3], &values).unwrap();
        let address = tensor.view().address();
        // SAFETY: a tensor of our own, which nobody else has.
        let mut back = unsafe { from_dlpack(&stream, to_dlpack(tensor).unwrap()) }.unwrap();
        assert_eq!((back.view().address(), back.view().dtype()), (address, T::DTYPE));
        assert_eq!((back.view().shape(), back.view().strides()), (&[2, 3][..], &[3, 1][..]));
        assert_eq!(back.view().to_vec::<T>(&stream).unwrap(), values);
        back.view_mut().unwrap().fill_zero(&stream).unwrap();
        let zeros = Tensor::zeros(&stream, &[2, 3], T::DTYPE).unwrap();
        let again = to_legacy_dlpack(zeros).unwrap();
        let emptied = back.view().to_vec::<T>(&stream).unwrap();
        drop(back);
        // SAFETY: as above.
        let again = unsafe { from_dlpack(&stream, again) }.unwrap();
        assert_eq!(again.view().to_vec::<T>(&stream).unwrap(), emptied);
        again.release().unwrap();
        assert_eq!(stream.device().pool().stats().num_live, before);
    }
    check([1f32, 2.0, -3.0, 4.5, f32::MAX, 0.0]);
    check([1f32, 2.0, -3.0, 4.5, 1e4, 0.0].map(f16::from_f32));
    check([1f32, 2.0, -3.0, 4.5, 1e30, 0.0].map(bf16::from_f32));
    check([1f32, 2.0, -3.0, 4.5, 448.0, 0.0].map(F8E4M3::from_f32));
    check([1i8, -2, 3, -128, 127, 0]);
    check([1i32, -2, 3, i32::MIN, i32::MAX, 0]);
    check([1u32, 2, 3, 4, u32::MAX, 0]);
}

/// Without elements there is no address, and nothing is wrong with any stride or alignment.
#[test]
fn nothing_at_all() {
    let stream = cpu();
    for shape in [&[0usize][..], &[3, 0], &[0, 0, 0], &[2, 0, 5]] {
        let managed = to_dlpack(Tensor::empty(&stream, shape, DType::BF16).unwrap()).unwrap();
        assert!(managed.validate_export().unwrap().data_ptr().is_null());
        // SAFETY: no elements.
        let mut back = unsafe { from_dlpack(&stream, managed) }.unwrap();
        assert_eq!(back.view().shape(), shape);
        assert_eq!(back.view().to_vec::<bf16>(&stream).unwrap(), []);
        back.view_mut().unwrap().fill_zero(&stream).unwrap();
    }
    for mut foreign in [Foreign::f32(&[0, 3], &[-7, -1]), Foreign::f32(&[4, 0], &[i64::MAX, i64::MIN])] {
        foreign.byte_offset = 3;
        assert_eq!(foreign.imported().unwrap(), []);
        foreign.is_null = true;
        assert_eq!(foreign.imported().unwrap(), []);
    }
    // One element, in no dimension and in several whose strides are never used.
    let scalar = Tensor::from_slice(&stream, &[], &[7i32]).unwrap();
    // SAFETY: a tensor of our own, which nobody else has.
    let back = unsafe { from_dlpack(&stream, to_dlpack(scalar).unwrap()) }.unwrap();
    assert_eq!((back.view().shape(), back.view().to_vec::<i32>(&stream).unwrap()), (&[][..], vec![7]));
    drop(back);
    assert_eq!(Foreign::f32(&[1, 1, 1], &[-4, i64::MAX, 0]).imported().unwrap(), [0.0]);
    // More than an i64 of nothing.
    let large = Tensor::empty(&stream, &[0, isize::MAX as usize], DType::I8).unwrap();
    assert!(to_dlpack(large).is_ok());
    let larger = Tensor::empty(&stream, &[0, usize::MAX], DType::I8).unwrap();
    assert!(matches!(to_dlpack(larger), Err(DlpackError::Sizes(_))));
    assert_eq!(stream.device().pool().stats().num_live, 0);
}

#[test]
fn what_is_refused_is_released() {
    let good = Foreign::f32(&[2, 3], &[3, 1]);
    assert_eq!(good.imported().unwrap(), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]);
    let refused = |change: fn(&mut Foreign)| {
        let mut foreign = good.clone();
        change(&mut foreign);
        foreign.imported().unwrap_err()
    };
    let error = refused(|foreign| foreign.device = DLDevice::metal(1));
    assert!(matches!(error, DlpackError::UnknownDevice { device } if device.device_id == 1), "{error}");
    let error = refused(|foreign| foreign.device = DLDevice::cuda(2));
    let (tensor, stream) = (Place::Cuda(2), Place::Cpu);
    assert!(
        matches!(error, DlpackError::OtherDevice { tensor: t, stream: s } if (t, s) == (tensor, stream)),
        "{error}"
    );
    assert_eq!(error.to_string(), "a tensor of cuda:2 for a stream of the CPU");
    let error = refused(|foreign| foreign.device = DLDevice::cuda(-2));
    assert!(matches!(error, DlpackError::UnknownDevice { .. }), "{error}");
    let error = refused(|foreign| foreign.dtype.lanes = 4);
    assert!(matches!(error, DlpackError::Lanes { lanes: 4 }), "{error}");
    for dtype in [DLDataType::F64, DLDataType::U8, DLDataType::BOOL, DLDataType::F8E4M3, DLDataType::I64] {
        let mut foreign = good.clone();
        foreign.dtype = dtype;
        let error = foreign.imported().unwrap_err();
        assert!(matches!(error, DlpackError::UnknownDType { dtype: of } if of == dtype), "{error}");
    }
    let error = refused(|foreign| foreign.byte_offset = 2);
    assert!(matches!(error, DlpackError::Misaligned { bytes: 4, .. }), "{error}");
    let error = refused(|foreign| foreign.byte_offset = u64::MAX - 3);
    assert!(matches!(error, DlpackError::NoData { .. }), "{error}");
    let error = refused(|foreign| foreign.is_null = true);
    assert!(matches!(error, DlpackError::NoData { data: 0, .. }), "{error}");
    let error = refused(|foreign| foreign.strides[1] = -1);
    assert!(matches!(error, DlpackError::NegativeStride { axis: 1, stride: -1 }), "{error}");
    let error = refused(|foreign| foreign.strides[0] = i64::MAX);
    assert!(matches!(error, DlpackError::Tensor(_)), "{error}");
    let error = refused(|foreign| foreign.shape[0] = -2);
    assert!(matches!(error, DlpackError::Description(_)), "{error}");
    let error = Foreign::f32(&[1; 6], &[1; 6]).imported().unwrap_err();
    assert!(matches!(error, DlpackError::Tensor(_)), "{error}");
    let error = Foreign::f32(&[i64::MAX, i64::MAX], &[0, 0]).imported().unwrap_err();
    assert!(matches!(error, DlpackError::Description(_)), "{error}");
}

#[test]
fn what_cannot_be_written() {
    let (stream, drops) = (cpu(), Arc::new(AtomicUsize::new(0)));
    let mut foreign = Foreign::f32(&[2, 3], &[3, 1]);
    foreign.flags = DlpackFlags::READ_ONLY;
    // SAFETY: 64 elements of 8 bytes, which nobody else has.
    let mut tensor =
        unsafe { from_dlpack(&stream, foreign.make::<DLManagedTensorVersioned>(&drops)) }.unwrap();
    assert!(tensor.is_read_only() && matches!(tensor.view_mut(), Err(DlpackError::ReadOnly)));
    assert_eq!(format!("{tensor:?}"), "DlpackTensor(f32 [2, 3] with strides [3, 1] of the CPU, read only)");
    drop(tensor);
    let foreign = Foreign::f32(&[2, 3], &[0, 1]);
    assert_eq!(foreign.imported().unwrap(), [0.0, 1.0, 2.0, 0.0, 1.0, 2.0]);
    // SAFETY: as above.
    let mut tensor = unsafe { from_dlpack(&stream, foreign.make::<DLManagedTensor>(&drops)) }.unwrap();
    assert!(matches!(tensor.view_mut(), Err(DlpackError::Overlapping { .. })));
    assert_eq!(drops.load(Ordering::Relaxed), 1);
    drop(tensor);
    assert_eq!(drops.load(Ordering::Relaxed), 2);
}

/// DLPack allows that there is nothing to call.
#[test]
fn no_deleter() {
    let (stream, values) = (cpu(), [1f32, 2.0, 3.0]);
    let mut shape = [3i64];
    let mut strides = [1i64];
    let mut legacy = DLManagedTensor {
        dl_tensor: dlpark::ffi::DLTensor {
            data: values.as_ptr().cast_mut().cast(),
            device: DLDevice::CPU,
            ndim: 1,
            dtype: DLDataType::F32,
            shape: shape.as_mut_ptr(),
            strides: strides.as_mut_ptr(),
            byte_offset: 0,
        },
        manager_ctx: std::ptr::null_mut(),
        deleter: None,
    };
    // SAFETY: description and memory are on this stack, and outlive the tensor.
    let tensor = unsafe { from_dlpack(&stream, Managed::from_raw(&mut legacy).unwrap()) }.unwrap();
    assert_eq!(tensor.view().to_vec::<f32>(&stream).unwrap(), values);
    drop(tensor);
    // Before DLPack 1.2 a tensor without gaps may leave its strides out.
    legacy.dl_tensor.strides = std::ptr::null_mut();
    // SAFETY: as above.
    let tensor = unsafe { from_dlpack(&stream, Managed::from_raw(&mut legacy).unwrap()) }.unwrap();
    assert_eq!((tensor.view().strides(), tensor.view().is_contiguous()), (&[1][..], true));
}

#[test]
fn another_major_version_is_released_unread() {
    let drops = Arc::new(AtomicUsize::new(0));
    let raw = Foreign::f32(&[2, 3], &[3, 1]).make::<DLManagedTensorVersioned>(&drops).into_raw();
    // SAFETY: just made, and nobody else's.
    unsafe { (*raw).version.major = 2 };
    // SAFETY: as above.
    assert!(unsafe { Managed::from_raw(raw) }.is_err());
    assert_eq!(drops.load(Ordering::Relaxed), 1);
}

/// A tensor that is shown is there until the last of its owners is gone, whichever that is.
#[test]
fn a_shared_tensor_outlives_its_owner() {
    let stream = cpu();
    let live = || stream.device().pool().stats().num_live;
    let tensor = Arc::new(Tensor::from_slice(&stream, &[2, 3], &[0i32, 1, 2, 3, 4, 5]).unwrap());
    let shown = share(&tensor, |view| view.slice(1, 1..3)?.swap_axes(0, 1)).unwrap();
    let refused = share(&tensor, |view| view.slice(1, 1..9));
    assert!(matches!(refused, Err(DlpackError::Tensor(_))));
    assert_eq!(Arc::strong_count(&tensor), 2);
    drop(tensor);
    assert_eq!(live(), 1);
    // SAFETY: shown by us, and written by nobody.
    let back = unsafe { from_dlpack(&stream, shown) }.unwrap();
    assert!(back.is_read_only());
    assert_eq!(gathered::<i32>(&stream, back.view()), [1, 4, 2, 5]);
    std::thread::spawn(move || drop(back)).join().unwrap();
    assert_eq!(live(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(128) })]

    /// Foreign tensors have the elements that their strides say.
    #[test]
    fn any_strides_are_read(
        axes in prop::collection::vec((0i64..4, 0i64..9), 0..=5),
        offset in 0u64..8,
    ) {
        let (shape, strides): (Vec<i64>, Vec<i64>) = axes.into_iter().unzip();
        let last: i64 = shape.iter().zip(&strides).map(|(size, stride)| (size - 1).max(0) * stride).sum();
        prop_assume!(last + (offset as i64) < 128);
        let mut foreign = Foreign::f32(&shape, &strides);
        foreign.byte_offset = 4 * offset;
        let mut wanted = vec![offset as i64];
        for (size, stride) in shape.iter().zip(&strides) {
            wanted = wanted.iter().flat_map(|at| (0..*size).map(move |i| at + i * stride)).collect();
        }
        let wanted: Vec<f32> = wanted.into_iter().map(|at| at as f32).collect();
        prop_assert_eq!(foreign.imported().unwrap(), wanted);
    }

    /// Parts of our own tensors are what others see.
    #[test]
    fn parts_are_shown(
        shape in prop::collection::vec(0usize..5, 1..=4),
        (axis, cut) in (0usize..4, (0usize..5, 0usize..5)),
        swap in (0usize..4, 0usize..4),
    ) {
        let stream = cpu();
        let rank = shape.len();
        let len: usize = shape.iter().product();
        let values: Vec<i32> = (0..len as i32).collect();
        let tensor = Arc::new(Tensor::from_slice(&stream, &shape, &values).unwrap());
        let axis = axis % rank;
        let (start, end) = (cut.0.min(cut.1).min(shape[axis]), cut.0.max(cut.1).min(shape[axis]));
        let part = |view: TensorView<'_>| -> Result<(Vec<usize>, Vec<i32>), host::Error> {
            let view = view.slice(axis, start..end)?.swap_axes(swap.0 % rank, swap.1 % rank)?;
            Ok((view.shape().to_vec(), gathered(&stream, view)))
        };
        let (wanted_shape, wanted) = part(tensor.view()).unwrap();
        let shown = share(&tensor, |view| view.slice(axis, start..end)?.swap_axes(swap.0 % rank, swap.1 % rank));
        let shown = shown.unwrap();
        drop(tensor);
        // SAFETY: shown by us, and written by nobody.
        let back = unsafe { from_dlpack(&stream, shown) }.unwrap();
        prop_assert_eq!(back.view().shape().to_vec(), wanted_shape);
        prop_assert_eq!(gathered::<i32>(&stream, back.view()), wanted);
        drop(back);
        prop_assert_eq!(stream.device().pool().stats().num_live, 0);
    }
}
