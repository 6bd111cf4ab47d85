//! Strided copy and cast against its reference, bit for bit.

use std::ops::Range;

use abi::ops::copy::{CopyKind, CopyVariant, VARIANTS};
use half::{bf16, f16};
use proptest::prelude::*;
use testkit::round::{decode, encode, round_all};
use testkit::strategies::{Rng, Values, any_values, dims, fill};
use warpforge::ops::copy::reference::{gather, scatter};
use warpforge::ops::copy::{CASES, Copy, CopyArgs, CopyProblem};
use warpforge::{DType, Device, Error, F8E4M3, Stream, Tensor, TensorView, TensorViewMut};

use crate::harness::{
    Contents, EVERY, Wanted, devices, devices_for, every_kernel, fail, on_executors, restrict,
    through_every_kernel,
};

const DTYPES: [DType; 7] =
    [DType::F32, DType::F16, DType::BF16, DType::F8E4M3, DType::I8, DType::I32, DType::U32];

/// A strided tensor inside a buffer.
#[derive(Clone, Debug)]
struct Strided {
    strides: Vec<usize>,
    /// Elements before the first one.
    offset: usize,
}

impl Strided {
    /// Axes in the order of `order` (innermost last), each with some padding behind it.
    fn new(shape: &[usize], order: &[usize], padding: &[usize], offset: usize) -> Self {
        let mut strides = vec![0; shape.len()];
        let mut step = 1;
        for &axis in order.iter().rev() {
            step += if axis + 1 == shape.len() { 0 } else { padding[axis] };
            strides[axis] = step;
            step *= shape[axis].max(1);
        }
        Strided { strides, offset }
    }

    /// The elements of the buffer that are the tensor's.
    fn elements(&self, shape: &[usize]) -> impl Iterator<Item = Range<usize>> {
        let mut starts = vec![self.offset];
        for (&size, &stride) in std::iter::zip(shape, &self.strides) {
            starts = starts.iter().flat_map(|start| (0..size).map(move |i| start + i * stride)).collect();
        }
        starts.into_iter().map(|start| start..start + 1)
    }

    /// Elements of the buffer: as many behind the tensor as before it, and some more.
    fn buffer_len(&self, shape: &[usize]) -> usize {
        let reach: usize =
            std::iter::zip(shape, &self.strides).map(|(size, stride)| size.saturating_sub(1) * stride).sum();
        2 * self.offset + reach + 1 + 32
    }
}

#[derive(Clone, Debug)]
struct Case {
    shape: Vec<usize>,
    src: Strided,
    dst: Strided,
    types: (DType, DType),
    /// Values of a kind, or any bits.
    kind: Option<Values>,
    seed: u64,
}

impl Case {
    fn work(&self) -> usize {
        5 * self.shape.iter().product::<usize>()
    }
}

fn types() -> impl Strategy<Value = (DType, DType)> {
    prop_oneof![
        proptest::sample::select(&DTYPES[..]).prop_map(|dtype| (dtype, dtype)),
        (proptest::sample::select(&DType::FLOATS[..]), proptest::sample::select(&DType::FLOATS[..])),
    ]
}

fn strided(shape: Vec<usize>) -> impl Strategy<Value = Strided> {
    let rank = shape.len();
    let in_order: Vec<usize> = (0..rank).collect();
    let order = prop_oneof![4 => Just(in_order.clone()), 1 => Just(in_order).prop_shuffle()];
    // Gaps of whole pieces of 16 bytes in every type, none, or any.
    let padding = prop_oneof![Just(0usize), (0usize..3).prop_map(|n| 16 * n), 0usize..20];
    let padding = proptest::collection::vec(padding, rank);
    let offset = prop_oneof![4 => (0usize..3).prop_map(|n| 16 * n), 1 => 0usize..17];
    (order, padding, offset)
        .prop_map(move |(order, padding, offset)| Strided::new(&shape, &order, &padding, offset))
}

fn case() -> impl Strategy<Value = Case> {
    let shape = prop_oneof![
        dims(&[16, 1024, 4096], 20_000).prop_map(|n| vec![n]),
        (dims(&[8], 40), dims(&[16, 64, 1024], 700)).prop_map(|(a, b)| vec![a, b]),
        (dims(&[8], 12), dims(&[8], 12), dims(&[16, 128], 130)).prop_map(|(a, b, c)| vec![a, b, c]),
        (0usize..5, 0usize..6, 0usize..7, dims(&[16, 32], 70)).prop_map(|(a, b, c, d)| vec![a, b, c, d]),
        Just(vec![]),
    ];
    let layouts = shape.prop_flat_map(|shape| (Just(shape.clone()), strided(shape.clone()), strided(shape)));
    (layouts, types(), proptest::option::of(any_values()), any::<u64>())
        .prop_map(|((shape, src, dst), types, kind, seed)| Case { shape, src, dst, types, kind, seed })
}

fn bytes_of(stream: &Stream, tensor: &Tensor) -> Result<Vec<u8>, Error> {
    fn cast<T: warpforge::Element>(values: Vec<T>) -> Vec<u8> {
        bytemuck::cast_slice(&values).to_vec()
    }
    Ok(match tensor.dtype() {
        DType::F32 => cast(tensor.to_vec::<f32>(stream)?),
        DType::F16 => cast(tensor.to_vec::<f16>(stream)?),
        DType::BF16 => cast(tensor.to_vec::<bf16>(stream)?),
        DType::F8E4M3 => cast(tensor.to_vec::<F8E4M3>(stream)?),
        DType::I8 => cast(tensor.to_vec::<i8>(stream)?),
        DType::I32 => cast(tensor.to_vec::<i32>(stream)?),
        DType::U32 => cast(tensor.to_vec::<u32>(stream)?),
    })
}

/// The view of a strided tensor in a buffer.
fn view<'a>(
    device: &Device,
    buffer: &'a Tensor,
    shape: &[usize],
    layout: &Strided,
) -> Result<TensorView<'a>, Error> {
    let address = buffer.view().address() + (layout.offset * buffer.dtype().bytes()) as u64;
    // SAFETY: inside the buffer, by `Strided::buffer_len`, and borrowed from it.
    unsafe { TensorView::from_raw(device, address, shape, &layout.strides, buffer.dtype()) }
}

fn view_mut<'a>(
    device: &Device,
    buffer: &'a mut Tensor,
    shape: &[usize],
    layout: &Strided,
) -> Result<TensorViewMut<'a>, Error> {
    let address = buffer.view().address() + (layout.offset * buffer.dtype().bytes()) as u64;
    // SAFETY: inside the buffer, by `Strided::buffer_len`, and borrowed from it alone.
    unsafe { TensorViewMut::from_raw(device, address, shape, &layout.strides, buffer.dtype()) }
}

fn run(device: &Device, case: &Case, variant: Option<&'static CopyVariant>) -> Result<(), TestCaseError> {
    let Case { shape, src, dst, types: (src_type, dst_type), kind, seed } = case;
    let (src_type, dst_type) = (*src_type, *dst_type);
    let stream = device.stream().map_err(fail)?;
    let elements = shape.iter().product();
    let problem = CopyProblem { elements, src: src_type, dst: dst_type };
    let plan = match variant {
        None => Copy::plan(device, problem),
        Some(variant) => Copy::plan_with(device, problem, variant),
    };
    let plan = plan.map_err(fail)?;

    let src_len = src.buffer_len(shape);
    let src_bytes = match kind {
        Some(kind) => {
            let values = fill(*kind, src_type, src_len, *seed);
            encode(src_type, &values.into_iter().map(f64::from).collect::<Vec<_>>())
        }
        None => {
            let mut rng = Rng::new(*seed);
            (0..src_len * src_type.bytes()).map(|_| rng.next_u64() as u8).collect()
        }
    };
    let before = vec![0xa5u8; dst.buffer_len(shape) * dst_type.bytes()];
    let src_buffer = Tensor::from_bytes(&stream, &[src_len], src_type, &src_bytes).map_err(fail)?;
    let mut dst_buffer =
        Tensor::from_bytes(&stream, &[dst.buffer_len(shape)], dst_type, &before).map_err(fail)?;
    restrict(&stream, &src_buffer, src.elements(shape), Contents::Kept).map_err(fail)?;
    restrict(&stream, &dst_buffer, dst.elements(shape), Contents::Undefined).map_err(fail)?;
    let args = CopyArgs {
        src: view(device, &src_buffer, shape, src).map_err(fail)?,
        dst: view_mut(device, &mut dst_buffer, shape, dst).map_err(fail)?,
    };
    plan.run(&stream, args).map_err(fail)?;
    let got = bytes_of(&stream, &dst_buffer).map_err(fail)?;
    let what = plan.report().variant;

    if src_type == dst_type {
        // Bytes, so that NaN payloads count.
        let size = src_type.bytes();
        let as_words = |bytes: &[u8]| -> Vec<u32> {
            bytes.chunks(size).map(|b| b.iter().rev().fold(0, |word, &b| word << 8 | u32::from(b))).collect()
        };
        let mut want = as_words(&before);
        let values = gather(&as_words(&src_bytes)[src.offset..], shape, &src.strides);
        scatter(&values, &mut want[dst.offset..], shape, &dst.strides, |word| word);
        let got = as_words(&got);
        let wrong = (0..want.len()).find(|&i| got[i] != want[i]);
        prop_assert_eq!(wrong, None, "{}: {:x?}", what, wrong.map(|i| (got[i], want[i])));
    } else {
        let mut want = decode(dst_type, &before);
        let values = gather(&decode(src_type, &src_bytes)[src.offset..], shape, &src.strides);
        let values = round_all(dst_type, &values);
        scatter(&values, &mut want[dst.offset..], shape, &dst.strides, |value| value);
        testkit::compare::check_bits_eq(&decode(dst_type, &got), &want)
            .map_err(|mismatch| fail(format!("{what}: {mismatch}")))?;
    }
    Ok(())
}

/// The wanted kernels that can do the case.
fn run_variants(cards: &[Device], case: &Case, wanted: Wanted<'_>) -> Result<(), TestCaseError> {
    let kind = CopyKind::of(case.types.0, case.types.1);
    for device in cards {
        for variant in VARIANTS.iter().filter(|v| Some(v.kind) == kind && wanted(v.entry)) {
            run(device, case, Some(variant))?;
        }
    }
    Ok(())
}

/// Sizes of 0, through every kernel.
pub fn nothing() -> Result<(), TestCaseError> {
    through_every_kernel(
        "copy",
        &[
            |case: &mut Case| case.shape.iter_mut().take(1).for_each(|size| *size = 0),
            |case: &mut Case| case.shape.iter_mut().for_each(|size| *size = 0),
        ],
        case(),
        Case::work,
        run_variants,
    )
}

#[test]
fn every_kernel_is_simulated() -> Result<(), TestCaseError> {
    every_kernel("copy", case(), Case::work, run_variants)
}

proptest! {
    #![proptest_config(testkit::gpu::proptest_config(256))]

    /// What `plan` chooses, on every device.
    #[test]
    fn planned((case, on) in on_executors(case, Case::work)) {
        for device in &on.devices() {
            run(device, &case, None)?;
        }
    }

    /// Every kernel that can do the case, on every floor.
    #[test]
    fn every_variant((case, on) in on_executors(case, Case::work)) {
        run_variants(&on.cards(), &case, EVERY)?;
    }
}

/// Every 16-bit value, and f32 values at and around the midpoints between 16-bit ones.
#[test]
fn all_casts() -> Result<(), TestCaseError> {
    let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_ne_bytes).collect();
    for narrow in [DType::F16, DType::BF16] {
        let values = decode(narrow, &all);
        let mut near = Vec::new();
        for pair in values.windows(2).filter(|pair| pair.iter().all(|v| v.is_finite())) {
            let middle = f64::midpoint(pair[0], pair[1]) as f32;
            near.extend([middle, middle.next_up(), middle.next_down()].map(f64::from));
        }
        for (src, dst, values) in [
            (narrow, DType::F32, &values),
            (DType::F16, DType::BF16, &decode(DType::F16, &all)),
            (DType::BF16, DType::F16, &decode(DType::BF16, &all)),
            (DType::F32, narrow, &near),
        ] {
            let bytes = if src == DType::F32 { encode(src, values) } else { all.clone() };
            for device in &devices_for(5 * values.len()) {
                let stream = device.stream()?;
                let shape = [values.len()];
                let plan = Copy::plan(device, CopyProblem { elements: values.len(), src, dst })?;
                let input = Tensor::from_bytes(&stream, &shape, src, &bytes)?;
                let mut out = Tensor::empty(&stream, &shape, dst)?;
                plan.run(&stream, CopyArgs { src: input.view(), dst: out.view_mut() })?;
                let got = decode(dst, &bytes_of(&stream, &out)?);
                testkit::compare::check_bits_eq(&got, &round_all(dst, values))
                    .map_err(|mismatch| fail(format!("{src} to {dst}: {mismatch}")))?;
            }
        }
    }
    Ok(())
}

/// The shapes of the benches, the large ones cut down in the first dimension.
#[test]
fn cases() -> Result<(), TestCaseError> {
    for case in CASES {
        let [rows, heads, cols] = case.shape;
        let shape = vec![rows.min(3), heads, cols];
        let layout = |stride| Strided { strides: vec![stride, cols, 1], offset: 0 };
        let (src, dst) = (layout(case.strides[0]), layout(case.strides[1]));
        let case = Case { shape, src, dst, types: (case.src, case.dst), kind: Some(Values::Normal), seed: 9 };
        for device in &devices_for(case.work()) {
            run(device, &case, None)?;
        }
    }
    Ok(())
}

/// Mistakes are found before anything runs, and the message names operator, argument, expectation and what came.
#[test]
fn bad_input() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        let problem = CopyProblem { elements: 12, src: DType::F32, dst: DType::BF16 };
        let plan = Copy::plan(device, problem)?;
        let message = |src: (&[usize], DType), dst: (&[usize], DType)| {
            let src = Tensor::zeros(&stream, src.0, src.1)?;
            let mut dst = Tensor::zeros(&stream, dst.0, dst.1)?;
            let args = CopyArgs { src: src.view(), dst: dst.view_mut() };
            Ok::<String, Error>(plan.run(&stream, args).unwrap_err().to_string())
        };
        let (f32s, bf16s) = (DType::F32, DType::BF16);
        assert_eq!(
            message((&[3, 4], f32s), (&[4, 3], bf16s))?,
            "copy: dst: expected shape [3, 4], got [4, 3]"
        );
        assert_eq!(message((&[3, 4], bf16s), (&[3, 4], bf16s))?, "copy: src: expected f32, got bf16");
        assert_eq!(message((&[3, 4], f32s), (&[3, 4], f32s))?, "copy: dst: expected bf16, got f32");
        assert_eq!(
            message((&[13], f32s), (&[13], bf16s))?,
            "copy: src: expected at most 12 elements, as planned, got 13"
        );
        let cast = CopyProblem { dst: DType::I8, ..problem };
        assert_eq!(
            Copy::supports(device, &cast).unwrap_err().to_string(),
            "copy: problem: expected equal types, or two of f32, f16 and bf16, got f32 to i8"
        );
    }
    Ok(())
}
