//! A run's tensors in host memory, for the CPU to do a card's work.

use std::any::Any;

use super::view::RawView;
use super::{Constant, Dims, MAX_RANK, Tensor, TensorView, TensorViewMut};
use crate::device::Device;
use crate::error::Error;
use crate::profile::Place;
use crate::stream::Stream;

/// What views of tensors are found in: the arguments of a run.
pub(crate) trait Views {
    /// Puts a copy in host memory in the place of each view; `name` is the argument's, for messages.
    fn bring(&mut self, name: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error>;
}

impl Views for TensorView<'_> {
    fn bring(&mut self, name: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error> {
        self.raw = mirror.copy(name, self.raw)?;
        Ok(())
    }
}

impl Views for TensorViewMut<'_> {
    fn bring(&mut self, name: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error> {
        let on_card = self.raw;
        self.raw = mirror.copy(name, on_card)?;
        mirror.results.push((on_card, self.raw));
        Ok(())
    }
}

impl<V: Views> Views for Option<V> {
    fn bring(&mut self, name: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error> {
        self.as_mut().map_or(Ok(()), |views| views.bring(name, mirror))
    }
}

impl<V: Views> Views for &mut [V] {
    fn bring(&mut self, name: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error> {
        self.iter_mut().try_for_each(|views| views.bring(name, mirror))
    }
}

/// A number among the arguments.
impl Views for u64 {
    fn bring(&mut self, _: &'static str, _: &mut Mirror<'_>) -> Result<(), Error> {
        Ok(())
    }
}

/// Makes [`Views`] of arguments, by all of their fields.
macro_rules! views {
    ($args:ident { $($field:ident),* $(,)? }) => {
        impl $crate::tensor::Views for $args<'_> {
            fn bring(
                &mut self,
                _: &'static str,
                mirror: &mut $crate::tensor::Mirror<'_>,
            ) -> Result<(), $crate::error::Error> {
                let $args { $($field),* } = self;
                $($crate::tensor::Views::bring($field, stringify!($field), mirror)?;)*
                Ok(())
            }
        }
    };
}
pub(crate) use views;

/// Copies of tensors of a card in host memory.
///
/// Each view has a copy of its own, without gaps, also where views lie over each other or interleave: what the CPU
/// may have as slices. Only a view's elements go back, not what lies between them.
pub(crate) struct Mirror<'a> {
    op: &'static str,
    on_card: &'a Stream,
    on_host: Stream,
    copies: Vec<Tensor>,
    /// What was copied from behind a reference.
    held: Vec<Box<dyn Any>>,
    /// Views to be written, and their copies.
    results: Vec<(RawView, RawView)>,
}

impl<'a> Mirror<'a> {
    /// Does `work` with copies of the arguments, and brings its results back in the order of the stream.
    pub(crate) fn run<A: Views>(
        op: &'static str,
        on_card: &'a Stream,
        cpu: &Device,
        mut args: A,
        work: impl FnOnce(&Stream, &mut A) -> Result<(), Error>,
    ) -> Result<(), Error> {
        let on_host = cpu.stream()?;
        let mut mirror =
            Mirror { op, on_card, on_host, copies: Vec::new(), held: Vec::new(), results: Vec::new() };
        args.bring("", &mut mirror)?;
        work(&mirror.on_host, &mut args)?;
        // The copies are the mirror's from here on.
        drop(args);
        mirror.write_back()
    }

    /// A copy of a tensor.
    pub(crate) fn tensor(&mut self, name: &'static str, tensor: &Tensor) -> Result<Tensor, Error> {
        self.expect_card(name, tensor.place)?;
        let mut copy = Tensor::empty(&self.on_host, tensor.shape(), tensor.dtype())?;
        self.on_card.queue().download(tensor.block.address(), copy.host_bytes_mut())?;
        Ok(copy)
    }

    /// A copy of a tensor that is not written any more.
    pub(crate) fn constant(&mut self, name: &'static str, tensor: &Tensor) -> Result<Constant, Error> {
        Constant::new(self.tensor(name, tensor)?, &self.on_host)
    }

    /// Keeps something as long as the copies.
    ///
    /// # Safety
    /// The reference is put among the arguments of [`Mirror::run`], and nowhere else: they end before the mirror.
    pub(crate) unsafe fn hold<'h, T: 'static>(&mut self, value: T) -> &'h T {
        let value = Box::new(value);
        let address: *const T = &*value;
        self.held.push(value);
        // SAFETY: on the heap until the mirror ends, and nobody writes it; not used beyond that — the caller.
        unsafe { &*address }
    }

    /// A copy of a view's elements, which the mirror keeps.
    fn copy(&mut self, name: &'static str, view: RawView) -> Result<RawView, Error> {
        self.expect_card(name, view.place)?;
        let mut strides = view.strides;
        let mut elements = 1;
        for axis in (0..view.shape.rank).rev() {
            // What is repeated is there once.
            let is_repeated = view.strides[axis] == 0 && view.shape[axis] > 1;
            strides.values[axis] = if is_repeated { 0 } else { elements };
            elements *= if is_repeated { 1 } else { view.shape[axis] };
        }
        let copy = Tensor::empty(&self.on_host, &[elements], view.dtype)?;
        let on_host = RawView { address: copy.raw().address, strides, place: copy.place, ..view };
        self.copies.push(copy);
        for_stretches(&view, &on_host, |on_card, at, len| {
            self.on_card.queue().download(on_card, bytes_of_mut(&on_host, at, len))
        })?;
        Ok(on_host)
    }

    fn expect_card(&self, name: &'static str, place: Place) -> Result<(), Error> {
        let card = self.on_card.device().place();
        if place == card {
            Ok(())
        } else {
            Err(Error::invalid(self.op, name, card.to_string(), place.to_string()))
        }
    }

    fn write_back(self) -> Result<(), Error> {
        for (view, copy) in &self.results {
            for_stretches(view, copy, |on_card, at, len| {
                self.on_card.queue().upload(on_card, bytes_of(copy, at, len))
            })?;
        }
        Ok(())
    }
}

/// Bytes of so many elements of a copy.
fn bytes_of(copy: &RawView, at: usize, len: usize) -> &[u8] {
    let size = copy.dtype.bytes();
    // SAFETY: a stretch of a copy's elements is in its tensor, which the mirror has, and nobody writes it meanwhile.
    unsafe { std::slice::from_raw_parts((copy.address as *const u8).add(at * size), len * size) }
}

/// The same to write.
#[expect(clippy::mut_from_ref, reason = "the view stands for memory of another owner")]
fn bytes_of_mut(copy: &RawView, at: usize, len: usize) -> &mut [u8] {
    let size = copy.dtype.bytes();
    // SAFETY: as for `bytes_of`, of a copy that nobody else has yet.
    unsafe { std::slice::from_raw_parts_mut((copy.address as *mut u8).add(at * size), len * size) }
}

/// Calls `each` with the stretches of elements that are neighbours in a view and its copy: address in the view, first
/// element in the copy, and how many.
fn for_stretches(
    view: &RawView,
    copy: &RawView,
    mut each: impl FnMut(u64, usize, usize) -> Result<(), Error>,
) -> Result<(), Error> {
    if view.len() == 0 {
        return Ok(());
    }
    let (mut rank, mut len) = (view.shape.rank, 1);
    while let Some(axis) = rank.checked_sub(1)
        && (view.shape[axis] == 1 || [view.strides[axis], copy.strides[axis]] == [len; 2])
    {
        len *= view.shape[axis];
        rank = axis;
    }
    // An axis that is repeated is gone through once.
    let size = |axis: usize| if copy.strides[axis] == 0 { 1 } else { view.shape[axis] };
    let mut index = [0; MAX_RANK];
    loop {
        let place = |strides: &Dims| (0..rank).map(|axis| index[axis] * strides[axis]).sum::<usize>();
        let address = view.address + (place(&view.strides) * view.dtype.bytes()) as u64;
        each(address, place(&copy.strides), len)?;
        let Some(axis) = (0..rank).rev().find(|&axis| index[axis] + 1 < size(axis)) else { return Ok(()) };
        index[axis] += 1;
        index[axis + 1..rank].fill(0);
    }
}

#[cfg(test)]
mod tests {
    use abi::DType;

    use super::*;

    /// Views of columns that interleave, of rows that are repeated, of one row, of nothing: the work sees their
    /// elements, and what it writes goes where it belongs and nowhere else.
    #[test]
    fn copies_go_there_and_back() -> Result<(), Error> {
        let device = Device::cpu();
        let stream = device.stream()?;
        let numbers: Vec<u32> = (0..24).collect();
        let tensor = Tensor::from_slice(&stream, &[2, 3, 4], &numbers)?;
        let repeated = Tensor::from_slice(&stream, &[1, 2], &[7u32, 8])?;
        let address = tensor.view().address();
        let columns = |from: u64| {
            // SAFETY: in the tensor, whose elements each of the two views has half of; the work has copies of them.
            unsafe {
                TensorViewMut::from_raw(&device, address + 4 * from, &[2, 3, 2], &[12, 4, 1], DType::U32)
            }
        };
        let none = tensor.view().slice(0, 0..0)?;
        let args =
            (columns(0)?, columns(2)?, repeated.view().repeat(0, 3)?, tensor.view().swap_axes(0, 2)?, none);
        struct Args<'a>(TensorViewMut<'a>, TensorViewMut<'a>, TensorView<'a>, TensorView<'a>, TensorView<'a>);
        impl Views for Args<'_> {
            fn bring(&mut self, _: &'static str, mirror: &mut Mirror<'_>) -> Result<(), Error> {
                self.0.bring("0", mirror)?;
                self.1.bring("1", mirror)?;
                for (name, view) in [("2", &mut self.2), ("3", &mut self.3), ("4", &mut self.4)] {
                    view.bring(name, mirror)?;
                }
                Ok(())
            }
        }
        let args = Args(args.0, args.1, args.2, args.3, args.4);
        Mirror::run("test", &stream, &Device::cpu(), args, |own, args| {
            let left = [0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21];
            assert_eq!(args.0.as_view().to_vec::<u32>(own)?, left);
            let right: Vec<u32> = left.iter().map(|at| at + 2).collect();
            assert_eq!(args.1.as_view().to_vec::<u32>(own)?, right);
            assert_eq!((args.2.shape(), args.2.strides()), (&[3, 2][..], &[0, 1][..]));
            assert_eq!(args.2.slice(0, 1..2)?.to_vec::<u32>(own)?, [7, 8]);
            let swapped: Vec<u32> = (0..24).map(|at| (at / 6) + 4 * (at / 2 % 3) + 12 * (at % 2)).collect();
            assert_eq!(args.3.to_vec::<u32>(own)?, swapped);
            assert!(args.4.is_empty());
            args.0.write(own, &left.map(|value| value + 100))
        })?;
        let expected: Vec<u32> = (0..24).map(|at| if at % 4 < 2 { at + 100 } else { at }).collect();
        assert_eq!(tensor.to_vec::<u32>(&stream)?, expected);
        Ok(())
    }
}
