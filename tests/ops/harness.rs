//! What the operators' tests share: where they run, and buffers with guard bands on the device.
//!
//! A property has one body for all executors: the CPU backend, the kernels in the simulator, the kernels on a card.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::{Arc, OnceLock};

use half::{bf16, f16};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;
use testkit::buffer::Guarded;
use testkit::compare::{Tolerance, check_within_naive};
use testkit::round::round_to;
use testkit::simulator::Card;
use warpforge::simulator::Simulator;
use warpforge::{
    Arch, Constant, DType, Device, Error, IMAGES, Place, Stream, Tensor, TensorView, TensorViewMut,
};

/// The most work that is simulated: about half a second. Larger cases run on the CPU and on real cards only.
///
/// The unit is an access to memory, some 0.1 µs. Tests estimate their work from the problem alone: what the kernels of
/// the operator access, and 3 more for each time that a thread waits for others.
const MAX_SIMULATED_WORK: usize = 1 << 22;

/// One case of a property in so many is simulated too.
const SIMULATED_SHARE: u32 = 4;

/// Where a case runs: always on the CPU and on every real card and floor, and perhaps on one simulated card.
#[derive(Clone, Copy, Debug)]
pub struct Executors {
    simulated: Option<Arch>,
}

/// Cases, and where each runs. Those that are simulated are of at most [`MAX_SIMULATED_WORK`].
pub fn on_executors<S: Strategy>(
    cases: impl Fn() -> S,
    work: impl Fn(&S::Value) -> usize,
) -> impl Strategy<Value = (S::Value, Executors)>
where
    S::Value: Clone,
{
    let small =
        cases().prop_filter("too much work to be simulated", move |case| work(case) <= MAX_SIMULATED_WORK);
    let floors = proptest::sample::select(&Arch::ALL[..]);
    prop_oneof![
        SIMULATED_SHARE - 1 => cases().prop_map(|case| (case, Executors { simulated: None })),
        1 => (small, floors).prop_map(|(case, floor)| (case, Executors { simulated: Some(floor) })),
    ]
}

impl Executors {
    /// The devices.
    pub fn devices(self) -> Vec<Device> {
        let mut devices = devices();
        devices.retain(|device| !is_simulated(device) || self.simulated == floor(device));
        devices
    }

    /// The cards among them.
    pub fn cards(self) -> Vec<Device> {
        let mut devices = self.devices();
        devices.retain(|device| device.limits().is_some());
        devices
    }
}

/// The devices for a case of its own: also a simulated card if the work is not too much.
pub fn devices_for(work: usize) -> Vec<Device> {
    let floor = Arch::ALL[work % Arch::ALL.len()];
    Executors { simulated: (work <= MAX_SIMULATED_WORK).then_some(floor) }.devices()
}

/// The cards that run kernels of this floor, simulated ones too.
pub fn cards_of(arch: Arch) -> Vec<Device> {
    let mut devices = devices();
    devices.retain(|device| floor(device) == Some(arch));
    devices
}

/// Whether a device is a card that runs kernels of this floor.
pub fn runs(device: &Device, kernel: Arch) -> bool {
    floor(device).is_some_and(|floor| floor.runs(kernel))
}

pub fn is_simulated(device: &Device) -> bool {
    matches!(device.place(), Place::Simulated(_))
}

/// Whether a kernel has to run for a case: simulated cards do the same, of which one is enough; real ones all do.
pub fn is_new<K: Ord>(device: &Device, done: &mut BTreeSet<K>, kernel_and_case: K) -> bool {
    !is_simulated(device) || done.insert(kernel_and_case)
}

fn floor(device: &Device) -> Option<Arch> {
    device.limits().map(|limits| limits.floor)
}

thread_local! {
    /// The simulated cards. Each test has its own, as it has a thread: they run side by side, and memory ends with the
    /// test.
    static SIMULATED: Vec<(Device, Arc<Card>)> = Arch::ALL
        .into_iter()
        .map(|floor| {
            let card = Arc::new(Card::new(floor));
            (Device::simulated(card.clone()).expect("a floor's own card"), card)
        })
        .collect();
}

thread_local! {
    /// The same for [`one_sm`].
    static ONE_SM: (Device, Arc<Card>) = {
        let card = Arc::new(Card::with_sms(Arch::Sm90a, 1));
        (Device::simulated(card.clone()).expect("a floor's own card"), card)
    };
}

thread_local! {
    /// The same for [`with_little_memory`].
    static LITTLE: Vec<(Device, Arc<Card>)> = Arch::ALL
        .into_iter()
        .map(|floor| {
            let card = Arc::new(Card::with_memory(floor, LITTLE_BYTES));
            (Device::simulated(card.clone()).expect("a floor's own card"), card)
        })
        .collect();
}

/// See [`with_little_memory`].
const LITTLE_BYTES: usize = 16 << 20;

/// A simulated card of a floor with 16 MiB of memory.
pub fn with_little_memory(arch: Arch) -> Device {
    let devices = LITTLE.with(|cards| cards.iter().map(|(device, _)| device.clone()).collect::<Vec<_>>());
    devices.into_iter().find(|device| floor(device) == Some(arch)).expect("a card of each floor")
}

/// A simulated Hopper with one multiprocessor: a block that stays does all tiles, one after the other.
pub fn one_sm() -> Device {
    ONE_SM.with(|(device, _)| device.clone())
}

/// The simulated card of this place, if it is one of this test's.
fn card_of(place: Place) -> Option<Arc<Card>> {
    if one_sm().place() == place {
        return ONE_SM.with(|(_, card)| Some(card.clone()));
    }
    let of_place = |cards: &Vec<(Device, Arc<Card>)>| {
        cards.iter().find(|(device, _)| device.place() == place).map(|(_, card)| card.clone())
    };
    SIMULATED.with(of_place).or_else(|| LITTLE.with(of_place))
}

/// All devices: the CPU, a simulated card of each floor, and the real card once for every floor that it runs. Says so
/// once if there is no card (`REQUIRE_GPU=1`: every test fails).
pub fn devices() -> Vec<Device> {
    static REAL: OnceLock<Vec<Device>> = OnceLock::new();
    let real = REAL.get_or_init(|| match Device::cuda(0) {
        Ok(card) => {
            let held = |arch: &Arch| IMAGES.iter().any(|image| image.arch == *arch);
            Arch::ALL.into_iter().filter(held).filter_map(|arch| card.with_arch(arch).ok()).collect()
        }
        Err(error) => {
            testkit::gpu::skip(&format!("the kernels of all tests run in the simulator only: {error}"));
            Vec::new()
        }
    });
    let mut devices = vec![Device::cpu()];
    SIMULATED.with(|cards| devices.extend(cards.iter().map(|(device, _)| device.clone())));
    devices.extend(real.iter().cloned());
    devices
}

/// The floors that have kernels of their own; Blackwell's are Ampere's.
const OWN_KERNELS: [Arch; 3] = [Arch::Sm61, Arch::Sm80, Arch::Sm90a];

/// Runs in the simulator each kernel of a family: draws cases until `run` has launched them all. It is told which
/// kernels are wanted still.
pub fn every_kernel<S: Strategy>(
    family: &str,
    cases: S,
    work: impl Fn(&S::Value) -> usize,
    run: impl Fn(&[Device], &S::Value, Wanted<'_>) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    every_kernel_of(abi::ops::entries(family), cases, work, run)
}

/// The same of some kernels of a family.
pub fn every_kernel_of<S: Strategy>(
    entries: impl Iterator<Item = &'static str>,
    cases: S,
    work: impl Fn(&S::Value) -> usize,
    run: impl Fn(&[Device], &S::Value, Wanted<'_>) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let mut missing: BTreeSet<&str> = entries.collect();
    let mut runner = TestRunner::deterministic();
    for number in 0..10_000 {
        let case = cases.new_tree(&mut runner).map_err(fail)?.current();
        if work(&case) > MAX_SIMULATED_WORK {
            continue;
        }
        let mut cards = Executors { simulated: Some(OWN_KERNELS[number % OWN_KERNELS.len()]) }.cards();
        cards.retain(is_simulated);
        run(&cards, &case, &|entry| missing.contains(entry))?;
        for card in cards.iter().filter_map(|card| card_of(card.place())) {
            missing.retain(|entry| !card.launched().contains(entry));
        }
        if missing.is_empty() {
            return Ok(());
        }
    }
    Err(TestCaseError::fail(format!("no case has run {missing:?}")))
}

/// Cases with a size of 0, each made so by one of `zeros`, through every kernel of a family, on each card: draws
/// cases until all kernels have been loaded for each of them.
pub fn through_every_kernel<S: Strategy>(
    family: &str,
    zeros: &[fn(&mut S::Value)],
    cases: S,
    work: impl Fn(&S::Value) -> usize,
    run: impl Fn(&[Device], &S::Value, Wanted<'_>) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    through_kernels(|| abi::ops::entries(family), zeros, cases, work, run)
}

/// The same of some kernels of a family.
pub fn through_kernels<S: Strategy, E: Iterator<Item = &'static str>>(
    entries: impl Fn() -> E,
    zeros: &[fn(&mut S::Value)],
    cases: S,
    work: impl Fn(&S::Value) -> usize,
    run: impl Fn(&[Device], &S::Value, Wanted<'_>) -> Result<(), TestCaseError>,
) -> Result<(), TestCaseError> {
    let cards = all_cards();
    for (number, zero) in zeros.iter().enumerate() {
        let mut missing: BTreeSet<&str> = entries().collect();
        let mut runner = TestRunner::deterministic();
        let mut draws = 0..10_000;
        while !missing.is_empty() {
            if draws.next().is_none() {
                return Err(TestCaseError::fail(format!("size {number}: no case is for {missing:?}")));
            }
            let mut case = cases.new_tree(&mut runner).map_err(fail)?.current();
            zero(&mut case);
            if work(&case) > MAX_SIMULATED_WORK / 16 {
                continue;
            }
            run(&cards, &case, &|entry| missing.contains(entry))?;
            let loaded = take_loaded();
            missing.retain(|entry| !loaded.contains(entry));
        }
    }
    Ok(())
}

/// Fails unless all of these kernels have been loaded on this test's simulated cards since the last time.
pub fn expect_loaded(entries: impl Iterator<Item = &'static str>) -> Result<(), TestCaseError> {
    let loaded = take_loaded();
    let missing: Vec<&str> = entries.filter(|entry| !loaded.contains(entry)).collect();
    if missing.is_empty() { Ok(()) } else { Err(TestCaseError::fail(format!("no case is for {missing:?}"))) }
}

/// All devices but the CPU.
pub fn all_cards() -> Vec<Device> {
    let mut cards = devices();
    cards.retain(|device| device.limits().is_some());
    cards
}

/// The kernels that have been loaded on this test's simulated cards since the last time.
fn take_loaded() -> BTreeSet<&'static str> {
    SIMULATED.with(|cards| cards.iter().flat_map(|(_, card)| card.take_loaded()).collect())
}

/// Which kernels to run, by entry.
pub type Wanted<'a> = &'a dyn Fn(&str) -> bool;

/// All of them.
pub const EVERY: Wanted<'static> = &|_| true;

/// Calls `$body` with `$type` as the Rust type of `$dtype`.
macro_rules! with_type {
    ($dtype:expr, $type:ident => $body:expr) => {
        match $dtype {
            DType::F32 => {
                type $type = f32;
                $body
            }
            DType::F16 => {
                type $type = f16;
                $body
            }
            DType::BF16 => {
                type $type = bf16;
                $body
            }
            DType::F8E4M3 => {
                type $type = warpforge::F8E4M3;
                $body
            }
            DType::I8 => {
                type $type = i8;
                $body
            }
            DType::I32 => {
                type $type = i32;
                $body
            }
            DType::U32 => {
                type $type = u32;
                $body
            }
        }
    };
}

pub(crate) use with_type;

/// Rows on a device, between guard bands and with poison between the rows.
pub struct Rows {
    tensor: Tensor,
    payload: Range<usize>,
    rows: usize,
    cols: usize,
    stride: usize,
    is_output: bool,
}

/// How rows lie in a buffer.
#[derive(Clone, Copy, Debug, Default)]
pub struct Layout {
    /// Elements between the end of a row and the start of the next.
    pub padding: usize,
    /// Elements by which the first row is moved away from an aligned address.
    pub offset: usize,
}

/// Layouts of several tensors: all alike, one apart, or each its own. What is asked of one tensor must not be looked up
/// at another; but by pieces of 16 bytes most kernels go only where all tensors are made for it.
pub fn layouts<const N: usize, S: Strategy<Value = Layout>>(
    layout: impl Fn() -> S,
) -> impl Strategy<Value = [Layout; N]> {
    let one_apart = (layout(), layout(), 0..N).prop_map(|(others, one, at)| {
        let mut all = [others; N];
        all[at] = one;
        all
    });
    let each_its_own = proptest::collection::vec(layout(), N).prop_map(|own| std::array::from_fn(|i| own[i]));
    prop_oneof![2 => layout().prop_map(|all| [all; N]), 1 => one_apart, 1 => each_its_own]
}

/// Each of several layouts in turn apart from the others: by its stride, and by an address and a stride that are not
/// for pieces of 16 bytes.
pub fn one_apart<const N: usize>() -> impl Iterator<Item = [Layout; N]> {
    let layouts = [(8, 0), (1, 0), (0, 1)].map(|(padding, offset)| Layout { padding, offset });
    (0..N).flat_map(move |at| {
        layouts.map(|one| std::array::from_fn(|i| if i == at { one } else { Layout::default() }))
    })
}

impl Rows {
    /// Rows that hold `values` (rounded to `dtype`).
    pub fn input(
        stream: &Stream,
        dtype: DType,
        values: &[f64],
        cols: usize,
        layout: Layout,
    ) -> Result<Self, Error> {
        let stride = cols + layout.padding;
        let (tensor, payload) = with_type!(dtype, T => {
            let values: Vec<T> = bytemuck::allocation::pod_collect_to_vec(&testkit::round::encode(dtype, values));
            upload(stream, &Guarded::strided(&values, cols.max(1), stride.max(1), layout.offset))?
        });
        let rows = values.len() / cols.max(1);
        restrict(stream, &tensor, payload_rows(&payload, rows, cols, stride), Contents::Kept)?;
        Ok(Rows { tensor, payload, rows, cols, stride, is_output: false })
    }

    /// Rows full of poison (NaN for floats).
    pub fn output(
        stream: &Stream,
        dtype: DType,
        rows: usize,
        cols: usize,
        layout: Layout,
    ) -> Result<Self, Error> {
        let stride = cols + layout.padding;
        let (tensor, payload) = with_type!(dtype, T => {
            upload(stream, &Guarded::<T>::poisoned(rows * stride, layout.offset))?
        });
        restrict(stream, &tensor, payload_rows(&payload, rows, cols, stride), Contents::Undefined)?;
        Ok(Rows { tensor, payload, rows, cols, stride, is_output: true })
    }

    /// `[rows, cols]`.
    pub fn view(&self) -> TensorView<'_> {
        let all = self.tensor.view().slice(0, self.payload.clone());
        all.and_then(|all| all.reshape(&[self.rows, self.stride])?.slice(1, 0..self.cols))
            .expect("a view of the payload")
    }

    /// The same rows, which nothing writes from here on.
    pub fn constant(self, stream: &Stream) -> Result<ConstantRows, Error> {
        let Rows { tensor, payload, rows, cols, stride, .. } = self;
        Ok(ConstantRows { tensor: Constant::new(tensor, stream)?, payload, rows, cols, stride })
    }

    /// `[rows, cols]`, to write.
    pub fn view_mut(&mut self) -> TensorViewMut<'_> {
        let all = self.tensor.view_mut().slice(0, self.payload.clone());
        all.and_then(|all| all.reshape(&[self.rows, self.stride])?.slice(1, 0..self.cols))
            .expect("a view of the payload")
    }

    /// The rows, after checking that nothing but them was written, and for an output that all of them were.
    pub fn read(&self, stream: &Stream) -> Result<Vec<f64>, TestCaseError> {
        let dtype = self.tensor.dtype();
        with_type!(dtype, T => {
            let padded = self.tensor.to_vec::<T>(stream).map_err(fail)?;
            let guarded = Guarded::from_padded(padded, self.payload.clone());
            guarded.check_guards().map_err(fail)?;
            guarded.check_row_padding(self.cols, self.stride.max(1)).map_err(fail)?;
            let rows: Vec<T> = guarded.rows(self.cols, self.stride.max(1));
            let unwritten = rows.iter().position(|value| {
                bytemuck::bytes_of(value) == bytemuck::bytes_of(&<T as testkit::Element>::POISON)
            });
            if let (true, true, Some(index)) = (self.is_output, dtype.bytes() > 1, unwritten) {
                return Err(TestCaseError::fail(format!("element {index} was not written")));
            }
            Ok(testkit::round::decode(dtype, bytemuck::cast_slice(&rows)))
        })
    }
}

/// Rows that nothing writes.
pub struct ConstantRows {
    tensor: Constant,
    payload: Range<usize>,
    rows: usize,
    cols: usize,
    stride: usize,
}

impl ConstantRows {
    /// `[rows, cols]`.
    pub fn view(&self) -> TensorView<'_> {
        let all = self.tensor.view().slice(0, self.payload.clone());
        all.and_then(|all| all.reshape(&[self.rows, self.stride])?.slice(1, 0..self.cols))
            .expect("a view of the payload")
    }
}

/// What a kernel finds in the allowed part of a restricted tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Contents {
    /// What is there.
    Kept,
    /// Nothing to be read before it is written.
    Undefined,
}

/// On a simulated card, puts everything of a tensor but these elements out of bounds for kernels.
pub fn restrict(
    stream: &Stream,
    tensor: &Tensor,
    allowed: impl Iterator<Item = Range<usize>>,
    contents: Contents,
) -> Result<(), Error> {
    let Some(card) = card_of(stream.device().place()) else { return Ok(()) };
    let (start, size) = (tensor.view().address(), tensor.dtype().bytes());
    let mut bytes = vec![0; tensor.bytes()];
    card.read(start, &mut bytes);
    card.forbid(start, bytes.len());
    for range in allowed.filter(|range| !range.is_empty()) {
        let range = range.start * size..range.end * size;
        let address = start + range.start as u64;
        match contents {
            Contents::Kept => card.write(address, &bytes[range]),
            Contents::Undefined => card.uninitialise(address, range.len()),
        }
    }
    Ok(())
}

fn payload_rows(
    payload: &Range<usize>,
    rows: usize,
    cols: usize,
    stride: usize,
) -> impl Iterator<Item = Range<usize>> + use<> {
    let start = payload.start;
    (0..rows).map(move |row| start + row * stride..start + row * stride + cols)
}

fn upload<T: testkit::Element + warpforge::Element>(
    stream: &Stream,
    guarded: &Guarded<T>,
) -> Result<(Tensor, Range<usize>), Error> {
    let padded = guarded.as_padded();
    Ok((Tensor::from_slice(stream, &[padded.len()], padded)?, guarded.payload_range()))
}

/// A `[outer, inner, cols]` as `[inner, outer, cols]`: what a view of it has to hold whose first two axes are swapped.
pub fn swapped(values: &[f64], [outer, inner, cols]: [usize; 3]) -> Vec<f64> {
    let row = |(i, o): (usize, usize)| &values[(o * inner + i) * cols..][..cols];
    (0..inner).flat_map(|i| (0..outer).map(move |o| (i, o))).flat_map(row).copied().collect()
}

/// Rows as `[tokens, heads, dim]`: a row of memory for each token, or for each token of a head after the other (see
/// [`swapped`]).
pub fn heads_of(
    rows: TensorView<'_>,
    [tokens, heads, dim]: [usize; 3],
    by_head: bool,
) -> Result<TensorView<'_>, Error> {
    if by_head {
        rows.reshape(&[heads, tokens, dim])?.swap_axes(0, 1)
    } else {
        rows.reshape(&[tokens, heads, dim])
    }
}

/// Turns any error into a failed case.
pub fn fail(error: impl std::fmt::Display) -> TestCaseError {
    TestCaseError::fail(error.to_string())
}

/// The error bound of the project; `what` names the device and variant in the message.
pub fn check(
    what: &str,
    got: &[f64],
    reference: &[f64],
    naive: &[f64],
    tolerance: &Tolerance<'_>,
) -> Result<(), TestCaseError> {
    match check_within_naive(got, reference, naive, tolerance) {
        Ok(_) => Ok(()),
        Err(mismatch) => Err(TestCaseError::fail(format!("{what}: {mismatch}"))),
    }
}

/// Rounds an f32 result of the naive computation to the storage type.
pub fn store(dtype: DType) -> impl Fn(f32) -> f32 {
    move |value| round_to(dtype, f64::from(value)) as f32
}

/// Values of a kind as f64, exactly representable in `dtype`.
pub fn values(kind: testkit::strategies::Values, dtype: DType, n: usize, seed: u64) -> Vec<f64> {
    testkit::strategies::fill(kind, dtype, n, seed).into_iter().map(f64::from).collect()
}

/// A float type.
pub fn floats() -> impl Strategy<Value = DType> {
    proptest::sample::select(&DType::FLOATS[..])
}
