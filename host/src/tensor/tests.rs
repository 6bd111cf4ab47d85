use proptest::prelude::*;

use super::*;
use crate::device::Device;

/// Where a view's elements lie relative to its first, in order: the definition, index by index.
fn offsets(shape: &[usize], strides: &[usize]) -> Vec<usize> {
    let mut offsets = vec![0];
    for (&size, &stride) in std::iter::zip(shape, strides) {
        offsets = offsets.iter().flat_map(|&o| (0..size).map(move |index| o + index * stride)).collect();
    }
    offsets
}

/// Offsets of a view of f32 from `start`.
fn view_offsets(view: &TensorView<'_>, start: u64) -> Vec<usize> {
    let first = (view.address() - start) as usize / 4;
    offsets(view.shape(), view.strides()).into_iter().map(|offset| first + offset).collect()
}

/// Whether some strides give these offsets, found by trying the only candidates.
fn needs_no_copy(offsets: &[usize], shape: &[usize]) -> bool {
    let mut step = 1;
    let mut strides = vec![0; shape.len()];
    for axis in (0..shape.len()).rev() {
        if shape[axis] > 1 {
            match offsets[step].checked_sub(offsets[0]) {
                Some(stride) => strides[axis] = stride,
                None => return false,
            }
        }
        step *= shape[axis];
    }
    let found = self::offsets(shape, &strides).into_iter().map(|offset| offsets[0] + offset);
    found.eq(offsets.iter().copied())
}

/// Shapes of up to [`MAX_RANK`] small axes, with ones among them.
fn shape() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1 => Just(1usize), 4 => 1usize..7, 1 => Just(8usize)], 0..=MAX_RANK)
}

/// A shape with strides: contiguous or with gaps, sometimes with its axes permuted.
fn strided() -> impl Strategy<Value = (Vec<usize>, Vec<usize>)> {
    let gaps = prop::collection::vec(prop_oneof![3 => Just(0usize), 1 => 1usize..9], MAX_RANK);
    (shape(), gaps, prop_oneof![3 => Just(0usize), 1 => 0usize..MAX_RANK]).prop_map(|(shape, gaps, turn)| {
        let mut step = 1;
        let mut axes: Vec<(usize, usize)> = Vec::new();
        for (&size, gap) in std::iter::zip(shape.iter().rev(), gaps) {
            axes.push((size, step));
            step = step * size + gap;
        }
        axes.reverse();
        let turn = turn % axes.len().max(1);
        axes.rotate_left(turn);
        axes.into_iter().unzip()
    })
}

/// A shape of the same number of elements: the prime factors of the first in a new grouping.
fn regrouped(shape: &[usize], choices: &[usize]) -> Vec<usize> {
    let mut groups = vec![1; 1 + choices[0] % MAX_RANK];
    let mut choices = choices.iter().cycle();
    let mut group = 0;
    for &size in shape {
        let mut rest = size;
        while rest > 1 {
            let factor = (2..=rest).find(|factor| rest % factor == 0).unwrap_or(rest);
            rest /= factor;
            // In order, so that many regroupings need no copy.
            if choices.next().is_some_and(|choice| choice % 2 == 0) && group + 1 < groups.len() {
                group += 1;
            }
            groups[group] *= factor;
        }
    }
    groups
}

/// Miri takes some thousand times as long for each.
const CASES: u32 = if cfg!(miri) { 4 } else { 4000 };

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(CASES) })]

    /// A reshaped view has the same elements in the same order; it fails only where that needs a copy.
    #[test]
    fn reshape_keeps_elements(
        (shape, strides) in strided(),
        choices in prop::collection::vec(0usize..100, 1..12),
    ) {
        // SAFETY: the memory is not read.
        let view = unsafe { TensorView::from_raw(&Device::cpu(), 1 << 20, &shape, &strides, DType::F32) };
        let view = view.map_err(|e| TestCaseError::fail(e.to_string()))?;
        let before = view_offsets(&view, 1 << 20);
        let wanted = regrouped(&shape, &choices);
        match view.reshape(&wanted) {
            Ok(new) => {
                prop_assert_eq!(new.shape(), &wanted[..]);
                prop_assert_eq!(view_offsets(&new, 1 << 20), before, "{:?} {:?}", shape, strides);
            }
            Err(error) => {
                prop_assert!(!needs_no_copy(&before, &wanted), "{}", error);
                let expected = format!(
                    "TensorView::reshape: shape: expected a shape that needs no copy, got {wanted:?} from {shape:?} \
                     with strides {strides:?}"
                );
                prop_assert_eq!(error.to_string(), expected);
            }
        }
    }

    /// A slice has the elements whose index on the axis is in the range.
    #[test]
    fn slice_keeps_elements((shape, strides) in strided(), axis: usize, from: usize, to: usize) {
        prop_assume!(!shape.is_empty());
        let axis = axis % shape.len();
        let (from, to) = (from % (shape[axis] + 1), to % (shape[axis] + 1));
        let range = from.min(to)..from.max(to);
        // SAFETY: the memory is not read.
        let view = unsafe { TensorView::from_raw(&Device::cpu(), 1 << 20, &shape, &strides, DType::F32) };
        let view = view.map_err(|e| TestCaseError::fail(e.to_string()))?;
        let inner: usize = shape[axis + 1..].iter().product();
        let wanted: Vec<usize> = view_offsets(&view, 1 << 20)
            .into_iter()
            .enumerate()
            .filter(|(index, _)| range.contains(&(index / inner % shape[axis])))
            .map(|(_, offset)| offset)
            .collect();
        let part = view.slice(axis, range.clone()).map_err(|e| TestCaseError::fail(e.to_string()))?;
        prop_assert_eq!(part.shape()[axis], range.len());
        prop_assert_eq!(view_offsets(&part, 1 << 20), wanted);
    }
}

#[test]
fn swapped_axes() -> Result<(), Error> {
    let stream = Device::cpu().stream()?;
    let tensor = Tensor::zeros(&stream, &[2, 3, 5], DType::F32)?;
    let view = tensor.view().swap_axes(0, 1)?;
    assert_eq!((view.shape(), view.strides()), (&[3, 2, 5][..], &[5, 15, 1][..]));
    assert_eq!(
        view.swap_axes(0, 3).unwrap_err().to_string(),
        "TensorView::swap_axes: axes: expected axes of [3, 2, 5], got 0 and 3"
    );
    Ok(())
}

#[test]
fn repeated_axes() -> Result<(), Error> {
    let stream = Device::cpu().stream()?;
    let tensor = Tensor::zeros(&stream, &[2, 1, 5], DType::F32)?;
    let view = tensor.view().repeat(1, 3)?;
    assert_eq!((view.shape(), view.strides()), (&[2, 3, 5][..], &[5, 0, 1][..]));
    assert!(!view.is_contiguous());
    assert_eq!(
        view.repeat(0, 3).unwrap_err().to_string(),
        "TensorView::repeat: axis: expected an axis of size 1 of [2, 3, 5], got 0"
    );
    Ok(())
}

#[test]
fn slice_refuses_what_is_outside() -> Result<(), Error> {
    let stream = Device::cpu().stream()?;
    let tensor = Tensor::zeros(&stream, &[3, 5], DType::F32)?;
    let message = |axis, range| tensor.view().slice(axis, range).unwrap_err().to_string();
    assert_eq!(
        message(1, 2..6),
        "TensorView::slice: range: expected a range inside axis 1 of [3, 5], got 2..6"
    );
    assert_eq!(
        message(2, 0..0),
        "TensorView::slice: range: expected a range inside axis 2 of [3, 5], got 0..0"
    );
    #[expect(clippy::reversed_empty_ranges)]
    let reversed = message(0, 2..1);
    assert_eq!(reversed, "TensorView::slice: range: expected a range inside axis 0 of [3, 5], got 2..1");
    assert!(tensor.view().slice(1, 5..5)?.is_empty());
    Ok(())
}

#[test]
fn empty_views() -> Result<(), Error> {
    let stream = Device::cpu().stream()?;
    let tensor = Tensor::zeros(&stream, &[3, 5], DType::F32)?;
    // Without elements there are no gaps between them.
    let empty = tensor.view().slice(1, 2..2)?;
    assert!(empty.is_contiguous());
    assert!(empty.to_vec::<f32>(&stream)?.is_empty());
    assert_eq!(empty.reshape(&[0, 7, 2])?.shape(), [0, 7, 2]);
    let error = empty.reshape(&[1, 1]).unwrap_err().to_string();
    assert_eq!(error, "TensorView::reshape: shape: expected 0 elements as in [3, 0], got [1, 1]");
    Ok(())
}

/// Sizes whose product does not fit are refused, also beside a 0, where wrapping arithmetic would find it right.
#[test]
fn huge_shapes_are_refused() -> Result<(), Error> {
    let stream = Device::cpu().stream()?;
    for shape in [&[usize::MAX, 2][..], &[1 << 62, 1], &[0, usize::MAX, 2], &[1 << 32, 1 << 32, 0]] {
        let error = Tensor::empty(&stream, shape, DType::F32).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("Tensor::empty: shape: expected a size that fits the address space, got {shape:?}")
        );
    }
    let tensor = Tensor::zeros(&stream, &[0, 5], DType::F32)?;
    let error = tensor.view().reshape(&[1 << 32, 1 << 32]).unwrap_err().to_string();
    assert_eq!(
        error,
        "TensorView::reshape: shape: expected 0 elements as in [0, 5], got [4294967296, 4294967296]"
    );
    assert_eq!(
        Tensor::empty(&stream, &[1; 6], DType::F32).unwrap_err().to_string(),
        "Dims: shape: expected at most 5 dimensions, got [1, 1, 1, 1, 1, 1]"
    );
    Ok(())
}

#[test]
fn bytes_and_types_are_checked() -> Result<(), Error> {
    let stream = Device::cpu().stream()?;
    for len in [0, 11, 13] {
        let error = Tensor::from_bytes(&stream, &[2, 3], DType::BF16, &vec![0; len]).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("Tensor::from_bytes: data: expected 12 bytes for [2, 3] of bf16, got {len} bytes")
        );
    }
    let tensor = Tensor::from_bytes(&stream, &[2], DType::BF16, &[0x80, 0x3f, 0, 0xc0])?;
    assert_eq!(tensor.to_f32_vec(&stream)?, [1.0, -2.0]);
    assert_eq!(
        tensor.to_vec::<f16>(&stream).unwrap_err().to_string(),
        "TensorView::to_vec: dtype: expected bf16, got f16"
    );
    let ints = Tensor::from_slice(&stream, &[2], &[1u32, 2])?;
    assert_eq!(
        ints.to_f32_vec(&stream).unwrap_err().to_string(),
        "Tensor::to_f32_vec: tensor: expected a float type, got u32"
    );
    let columns = Tensor::from_slice(&stream, &[2, 2], &[1u32, 2, 3, 4])?;
    assert_eq!(
        columns.view().slice(1, 0..1)?.to_vec::<u32>(&stream).unwrap_err().to_string(),
        "TensorView::to_vec: view: expected a contiguous view, got shape [2, 1] with strides [2, 1]"
    );
    assert_eq!(columns.view().slice(0, 1..2)?.to_vec::<u32>(&stream)?, [3, 4]);
    assert_eq!(
        Tensor::from_slice(&stream, &[2, 2], &[1i8, 2, 3]).unwrap_err().to_string(),
        "Tensor::from_slice: data: expected 4 bytes for [2, 2] of i8, got 3 bytes"
    );
    // SAFETY: it is refused before there is a view.
    let view = unsafe { TensorView::from_raw(&Device::cpu(), 0, &[2, 2], &[1], DType::F32) };
    assert_eq!(view.unwrap_err().to_string(), "TensorView: strides: expected 2 strides for [2, 2], got [1]");
    Ok(())
}

/// Elements go to and come from a part of a tensor that is there, and nothing else of it changes.
#[test]
fn parts_are_written_and_read() -> Result<(), Error> {
    let stream = Device::cpu().stream()?;
    let mut tensor = Tensor::from_slice(&stream, &[3, 2], &[0u32, 1, 2, 3, 4, 5])?;
    tensor.view_mut().slice(0, 1..2)?.write(&stream, &[20u32, 30])?;
    assert_eq!(tensor.to_vec::<u32>(&stream)?, [0, 1, 20, 30, 4, 5]);
    let mut last = [9u32; 4];
    tensor.view().slice(0, 1..3)?.read_into(&stream, &mut last)?;
    assert_eq!(last, [20, 30, 4, 5]);
    tensor.view_mut().slice(0, 3..3)?.write::<u32>(&stream, &[])?;
    tensor.view().slice(1, 0..0)?.read_into::<u32>(&stream, &mut [])?;

    let written =
        |tensor: &mut Tensor, range, data: &[u32]| tensor.view_mut().slice(1, range)?.write(&stream, data);
    let read = |range, data: &mut [u32]| tensor.view().slice(1, range)?.read_into(&stream, data);
    let message = |result: Result<(), Error>| result.unwrap_err().to_string();
    let gaps = "view: expected a contiguous view, got shape [3, 1] with strides [2, 1]";
    let short = "data: expected 24 bytes for [3, 2] of u32, got 20 bytes";
    assert_eq!(message(read(0..1, &mut [7; 3])), format!("TensorView::read_into: {gaps}"));
    assert_eq!(message(read(0..2, &mut [7; 5])), format!("TensorView::read_into: {short}"));
    assert_eq!(
        message(tensor.view().read_into(&stream, &mut [0f32; 6])),
        "TensorView::read_into: dtype: expected u32, got f32"
    );
    assert_eq!(message(written(&mut tensor, 0..1, &[7; 3])), format!("TensorViewMut::write: {gaps}"));
    assert_eq!(message(written(&mut tensor, 0..2, &[7; 5])), format!("TensorViewMut::write: {short}"));
    assert_eq!(
        message(tensor.view_mut().write(&stream, &[0i32; 6])),
        "TensorViewMut::write: dtype: expected u32, got i32"
    );
    assert_eq!(tensor.to_vec::<u32>(&stream)?, [0, 1, 20, 30, 4, 5]);
    Ok(())
}

/// Views beyond the address space have no size in elements or bytes.
#[test]
fn huge_views_are_refused() -> Result<(), Error> {
    let stream = Device::cpu().stream()?;
    let tensor = Tensor::zeros(&stream, &[1, 4], DType::F32)?;
    for times in [1 << 59, 1 << 62, usize::MAX] {
        assert_eq!(
            tensor.view().repeat(0, times).map(|view| view.len()).unwrap_err().to_string(),
            format!(
                "TensorView::repeat: times: expected a size that fits the address space, got [{times}, 4]"
            )
        );
    }
    assert_eq!(tensor.view().repeat(0, 1 << 58)?.len(), 1 << 60);
    // SAFETY: it is refused before there is a view.
    let view = unsafe { TensorViewMut::from_raw(&Device::cpu(), 0, &[1 << 62, 4], &[0, 1], DType::I8) };
    assert_eq!(
        view.unwrap_err().to_string(),
        "TensorViewMut: shape: expected a size that fits the address space, got [4611686018427387904, 4]"
    );
    Ok(())
}

/// What the kernels' 16-byte paths ask of a view.
#[test]
fn alignment_of_rows() -> Result<(), Error> {
    // SAFETY: the memory is not read.
    let view = |address, shape: &[usize], strides: &[usize]| unsafe {
        TensorView::from_raw(&Device::cpu(), address, shape, strides, DType::BF16)
    };
    assert!(view(4096, &[3, 16], &[24, 1])?.is_aligned_16());
    assert!(!view(4104, &[3, 16], &[24, 1])?.is_aligned_16());
    assert!(!view(4096, &[3, 12], &[24, 1])?.is_aligned_16());
    assert!(!view(4096, &[3, 16], &[20, 1])?.is_aligned_16());
    // There is no second row that the stride could put out of place.
    assert!(view(4096, &[1, 16], &[20, 1])?.is_aligned_16());
    assert!(!view(4096, &[], &[])?.is_aligned_16());
    Ok(())
}

/// Memory that a caller vouches for: what cannot be true of any is refused.
#[test]
fn addresses_that_cannot_be() -> Result<(), Error> {
    let device = Device::cpu();
    let data = [0u32; 16];
    let address = data.as_ptr() as u64;
    // SAFETY: inside `data`, or refused.
    let view = |address, shape: &[usize], strides: &[usize]| unsafe {
        TensorView::from_raw(&device, address, shape, strides, DType::U32)
    };
    assert_eq!(view(address, &[2, 2], &[8, 3])?.shape(), [2, 2]);
    // Nothing is behind the address of a view without elements.
    assert!(view(0, &[3, 0], &[0, 1])?.is_empty());
    let null = view(0, &[1], &[1]).unwrap_err().to_string();
    assert_eq!(
        null,
        "TensorView: address: expected an address that is a multiple of 4, and not null, got 0x0"
    );
    let odd = view(4098, &[1], &[1]).unwrap_err().to_string();
    assert_eq!(
        odd,
        "TensorView: address: expected an address that is a multiple of 4, and not null, got 0x1002"
    );
    for (shape, strides) in [
        (&[2, 2], &[usize::MAX, 1]),
        (&[3, 1], &[usize::MAX / 2, 1]),
        (&[2, 2], &[1 << 62, 1]),
        (&[2, 2], &[usize::MAX / 8, 1]),
    ] {
        let message = view(address, shape, strides).unwrap_err().to_string();
        let expected = format!(
            "TensorView: strides: expected elements within the address space for {shape:?}, got {strides:?}"
        );
        assert_eq!(message, expected);
    }
    // SAFETY: refused.
    let error = unsafe { TensorViewMut::from_raw(&device, 2, &[1], &[1], DType::F32) }.unwrap_err();
    assert!(error.to_string().starts_with("TensorViewMut: address: "), "{error}");
    Ok(())
}

#[test]
fn a_tensor_is_shown_without_its_pool() -> Result<(), Error> {
    let stream = Device::cpu().stream()?;
    let tensor = Tensor::zeros(&stream, &[2, 3], DType::F32)?;
    let address = tensor.view().address();
    assert_eq!(format!("{tensor:?}"), format!("Tensor(f32 [2, 3] at {address:#x} of the CPU)"));
    Ok(())
}

/// What is cloned is another tensor, in whatever shape.
#[test]
fn a_clone_is_its_own_and_a_shape_is_no_copy() -> Result<(), Error> {
    let stream = Device::cpu().stream()?;
    for shape in [&[2, 3, 4][..], &[24], &[0, 5], &[]] {
        let data: Vec<i32> = (0..shape.iter().product::<usize>() as i32).collect();
        let mut tensor = Tensor::from_slice(&stream, shape, &data)?;
        let clone = tensor.try_clone(&stream)?;
        tensor.view_mut().fill_zero(&stream)?;
        assert_eq!((clone.shape(), clone.dtype()), (shape, DType::I32));
        assert_eq!(clone.to_vec::<i32>(&stream)?, data);
        let address = clone.view().address();
        let flat = clone.reshape(&[data.len(), 1])?;
        assert_eq!((flat.shape(), flat.view().address()), (&[data.len(), 1][..], address));
        assert_eq!(flat.to_vec::<i32>(&stream)?, data);
        let message = flat.reshape(&[data.len() + 1]).unwrap_err().to_string();
        assert!(message.starts_with("Tensor::reshape: shape: expected "), "{message}");
    }
    // Its number of elements is that of no type.
    let tensor = Tensor::zeros(&stream, &[0], DType::F32)?;
    assert!(tensor.reshape(&[usize::MAX, 2]).is_err());
    Ok(())
}

/// The same memory, shape and elements in another stream.
#[test]
fn a_tensor_goes_to_another_stream() {
    let device = Device::cpu();
    let (first, second) = (device.stream().unwrap(), device.stream().unwrap());
    let tensor = Tensor::from_slice(&first, &[3, 1], &[1i32, 2, 3]).unwrap();
    let address = tensor.view().address();
    let tensor = tensor.into_stream(&second).unwrap();
    assert_eq!((tensor.view().address(), tensor.shape()), (address, &[3, 1][..]));
    assert_eq!(tensor.to_vec::<i32>(&second).unwrap(), [1, 2, 3]);
}
