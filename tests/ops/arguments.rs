//! Arguments that do not fit: every operator refuses each of its tensors where the type, a size or a stride is wrong,
//! and says which tensor that is; and it takes whatever stride a row has that is alone. The operators' own tests have
//! what else can be wrong, and the words of the messages.

use warpforge::ops;
use warpforge::{DType, Error, Sample, SampleTensor, Stream, Tensor, TensorViewMut};

use crate::harness::devices;

/// What is wrong with a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Mistake {
    Nothing,
    Type,
    /// One more than there should be, along this axis.
    Longer(usize),
    /// Elements that are not next to each other.
    Gaps,
}

/// A tensor, perhaps of every second element.
struct Argument {
    tensor: Tensor,
    shape: Vec<usize>,
}

impl Argument {
    fn new(stream: &Stream, sample: &SampleTensor, mistake: Mistake) -> Result<Self, Error> {
        let (mut shape, mut dtype, mut apart) = (sample.shape.clone(), sample.dtype, 1);
        match mistake {
            Mistake::Nothing => {}
            Mistake::Type => dtype = if dtype == DType::I32 { DType::U32 } else { DType::I32 },
            Mistake::Longer(axis) => shape[axis] += 1,
            Mistake::Gaps => apart = 2,
        }
        let whole = [&shape[..], &[apart]].concat();
        let len = whole.iter().product::<usize>();
        let tensor = match dtype {
            DType::U32 => Tensor::from_slice(stream, &whole, &(0..len as u32).collect::<Vec<_>>())?,
            _ => Tensor::zeros(stream, &whole, dtype)?,
        };
        Ok(Argument { tensor, shape })
    }

    fn view_mut(&mut self) -> Result<TensorViewMut<'_>, Error> {
        self.tensor.view_mut().slice(self.shape.len(), 0..1)?.reshape(&self.shape)
    }
}

fn run(stream: &Stream, sample: &Sample, at: usize, mistake: Mistake) -> Result<(), Error> {
    let mut arguments = Vec::new();
    for (index, tensor) in sample.tensors.iter().enumerate() {
        let mistake = if index == at { mistake } else { Mistake::Nothing };
        arguments.push(Argument::new(stream, tensor, mistake)?);
    }
    let views: Result<Vec<_>, Error> = arguments.iter_mut().map(Argument::view_mut).collect();
    sample.run(stream, &mut views?)
}

/// All tensors right, then each mistake of each tensor but those that are none. A size may be another tensor's fault.
#[test]
fn mistakes_are_refused() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        for sample in ops::samples(device, 4, DType::F32)?.into_iter().flat_map(|(_, samples)| samples) {
            let op = sample.op;
            run(&stream, &sample, 0, Mistake::Nothing)?;
            for (at, tensor) in sample.tensors.iter().enumerate() {
                let SampleTensor { name, shape, free_axes, strided, .. } = tensor;
                let longer = (0..shape.len()).filter(|axis| !free_axes.contains(axis)).map(Mistake::Longer);
                let gaps = (!strided && shape.last() > Some(&1)).then_some(Mistake::Gaps);
                for mistake in longer.chain([Mistake::Type]).chain(gaps) {
                    let Err(error) = run(&stream, &sample, at, mistake) else {
                        panic!("{op}: {name}: {mistake:?} on {device:?}");
                    };
                    let whose = if matches!(mistake, Mistake::Longer(_)) {
                        format!("{op}: ")
                    } else {
                        format!("{op}: {name}: expected ")
                    };
                    assert!(error.to_string().starts_with(&whose), "{name}, {mistake:?}: {error}");
                }
            }
        }
    }
    Ok(())
}

/// Views of one row, whose stride is any number, as other libraries make them; of each tensor, and of all.
#[test]
fn a_row_alone_has_any_stride() -> Result<(), Error> {
    for device in &devices() {
        let stream = device.stream()?;
        for sample in ops::samples(device, 1, DType::F32)?.into_iter().flat_map(|(_, samples)| samples) {
            for wide in (0..sample.tensors.len()).map(Some).chain([None]) {
                let mut arguments = Vec::new();
                for tensor in &sample.tensors {
                    arguments.push(Argument::new(&stream, tensor, Mistake::Nothing)?);
                }
                let mut views = Vec::new();
                for (at, argument) in arguments.iter_mut().enumerate() {
                    let shape = argument.shape.clone();
                    let view = argument.view_mut()?;
                    if wide.is_some_and(|wide| wide != at) {
                        views.push(view);
                        continue;
                    }
                    let strides: Vec<usize> = std::iter::zip(&shape, view.strides())
                        .map(|(&size, &stride)| if size == 1 { (1 << 33) + 1 } else { stride })
                        .collect();
                    // SAFETY: the elements of the view, which is not used any more: no axis with another stride has a
                    // second one.
                    views.push(unsafe {
                        TensorViewMut::from_raw(device, view.address(), &shape, &strides, view.dtype())?
                    });
                }
                let name = wide.map_or("all", |wide| sample.tensors[wide].name);
                if let Err(error) = sample.run(&stream, &mut views) {
                    panic!("{name} on {device:?}: {error}");
                }
            }
        }
    }
    Ok(())
}

/// A stream of another device is refused before anything is done, in the operator's name.
#[test]
fn streams_of_another_device() -> Result<(), Error> {
    let devices = devices();
    for device in &devices {
        let own = device.stream()?;
        for sample in ops::samples(device, 4, DType::F32)?.into_iter().flat_map(|(_, samples)| samples) {
            for other in devices.iter().filter(|other| other.place() != device.place()) {
                let mut arguments = Vec::new();
                for tensor in &sample.tensors {
                    arguments.push(Argument::new(&own, tensor, Mistake::Nothing)?);
                }
                let views: Result<Vec<_>, Error> = arguments.iter_mut().map(Argument::view_mut).collect();
                let error = sample.run(&other.stream()?, &mut views?).unwrap_err().to_string();
                let expected =
                    format!("{}: stream: expected a stream of {}, got ", sample.op, device.place());
                assert!(error.starts_with(&expected), "{error}");
            }
        }
    }
    Ok(())
}
