//! Kernels of one's own: loaded for a device, launched with tensors and scalars, in streams and in graphs.
//!
//! A kernel is written with `cuda_std`, compiled by `cuda_builder` from a build script, and found by its name:
//!
//! ```no_run
//! use host::module::{In, Module, Out};
//! use host::{DType, Device, Error, Tensor};
//!
//! # const PTX: &str = "";
//! # fn main() -> Result<(), Error> {
//! let device = Device::cuda(0)?;
//! let stream = device.stream()?;
//! // PTX: include_str!(concat!(env!("OUT_DIR"), "/kernels.ptx"))
//! let module = Module::load(&device, PTX)?;
//! // pub unsafe fn scale(x: *const f32, out: *mut f32, n: u32, factor: f32)
//! let scale = module.function::<(In<f32>, Out<f32>, u32, f32)>("scale")?;
//! let x = Tensor::from_slice(&stream, &[1000], &[2.0f32; 1000])?;
//! let mut out = Tensor::empty(&stream, &[1000], DType::F32)?;
//! let args = (x.view(), out.view_mut(), 1000, 0.5);
//! // SAFETY: the kernel's parameters are these, and it touches `n` elements of `x` and `out`, which they have.
//! unsafe { scale.launch(&stream, [4, 1, 1], [256, 1, 1], args)? };
//! # Ok(())
//! # }
//! ```
//!
//! On a simulated card ([`Device::simulated`]) the same code runs the same kernels in the simulator, if the program has
//! their crate (`use its_name as _;`): they are found by name, and the PTX is not looked at. So a test needs no card,
//! and what is wrong with a launch or a kernel is an error that says where. `examples/own_operator` is such a crate.

use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use bytemuck::Pod;

use crate::cuda;
use crate::device::{Backend, Device};
use crate::error::Error;
use crate::launch::Entry;
use crate::param::Param;
use crate::profile::{Place, Resources};
use crate::simulator::Simulator;
use crate::stream::Stream;
use crate::tensor::{Element, TensorView, TensorViewMut};

/// Kernels that a device has loaded. It stays loaded as long as the device is there; cheap to clone.
#[derive(Clone, Debug)]
pub struct Module {
    device: Device,
    code: Code,
}

#[derive(Clone, Debug)]
enum Code {
    Cuda { module: cuda::LoadedModule, target: String, entries: Vec<(String, Option<Vec<usize>>)> },
    Simulated(Arc<dyn Simulator>),
}

impl Module {
    /// Loads PTX, which the driver assembles for the card. On a simulated card it is not looked at.
    ///
    /// **Errors**: [`Error::Module`] if the driver refuses it, with the driver's log; [`Error::Invalid`] if it has a
    /// NUL byte; [`Error::Unsupported`] on the CPU, which has no kernels.
    pub fn load(device: &Device, ptx: &str) -> Result<Self, Error> {
        let code = match device.backend() {
            Backend::Cpu => {
                let reason = "the CPU has no kernels to load".into();
                return Err(Error::Unsupported { op: "Module::load", device: device.describe(), reason });
            }
            Backend::Cuda(_, modules) => {
                let target = target(ptx).to_owned();
                let module = modules.load("Module::load", ptx, &target)?;
                Code::Cuda { module, target, entries: entries(ptx) }
            }
            Backend::Simulated(simulator) => Code::Simulated(simulator.clone()),
        };
        Ok(Module { device: device.clone(), code })
    }

    /// The kernel of this name, whose parameters are those of `P`: a tuple of [`In`], [`Out`], [`ByValue`] and scalars,
    /// in order. Their number and sizes are compared with what the PTX declares; a simulated card does that when the
    /// kernel is launched.
    ///
    /// **Errors**: [`Error::Invalid`] for a name that the module does not have, or other parameters;
    /// [`Error::Unsupported`] if a simulated card has no such kernel; [`Error::Driver`].
    pub fn function<P: Signature>(&self, name: &'static str) -> Result<Function<P>, Error> {
        self.function_with(name, 0)
    }

    /// The same, with so many bytes of dynamic shared memory for each block.
    ///
    /// **Errors**: as [`Module::function`]; [`Error::Driver`] also for more than the card has.
    pub fn function_with<P: Signature>(
        &self,
        name: &'static str,
        shared_bytes: u32,
    ) -> Result<Function<P>, Error> {
        let op = "Module::function";
        let entry = match &self.code {
            Code::Cuda { module, target, entries } => {
                let Some((_, declared)) = entries.iter().find(|(entry, _)| entry == name) else {
                    let held: Vec<&str> = entries.iter().map(|(entry, _)| entry.as_str()).collect();
                    return Err(Error::invalid(op, "name", format!("one of {held:?}"), name));
                };
                if let Some(declared) = declared.as_ref().filter(|declared| declared[..] != *P::BYTES) {
                    let expected = format!("parameters of {declared:?} bytes");
                    return Err(Error::invalid(name, "parameters", expected, format!("{:?}", P::BYTES)));
                }
                // Only a device of the driver's has loaded one.
                let Backend::Cuda(_, modules) = self.device.backend() else {
                    return Err(Error::invalid(op, "device", "a CUDA device", self.device.describe()));
                };
                let loaded = modules.entry_in(module, target, name, shared_bytes)?;
                Entry::of_ptx(&self.device, op, name, shared_bytes, loaded)
            }
            Code::Simulated(simulator) if simulator.has_kernel(name, self.device.arch()) => {
                Entry::of_simulator(&self.device, op, name, shared_bytes, simulator)
            }
            Code::Simulated(_) => {
                let reason = format!("no crate of this program has a kernel {name}");
                return Err(Error::Unsupported { op, device: self.device.describe(), reason });
            }
        };
        Ok(Function { entry, place: self.device.place(), signature: PhantomData })
    }
}

/// A kernel with parameters of `P`, ready to be launched. Cheap to clone.
pub struct Function<P> {
    entry: Entry,
    place: Place,
    signature: PhantomData<fn(P)>,
}

impl<P: Signature> Function<P> {
    /// Enqueues the kernel in `stream`, by a grid of so many blocks in x, y and z, of so many threads; nothing if there
    /// are no blocks. It can be recorded ([`Stream::capture`]). Nothing is allocated.
    ///
    /// # Safety
    /// - `P` has the types that the kernel declares, in order. That their sizes agree is checked; that an address is of
    ///   f32 and not of i32, or a word a float, is not.
    /// - The kernel keeps its own contract with this grid, these blocks and these values: it touches no memory but the
    ///   elements of these tensors and what else it may, writes none but those of [`Out`], and has no race.
    /// - Streams are as with any operator: a tensor of another stream is ordered by [`Stream::wait_for`], before the
    ///   launch and before the tensor is dropped.
    ///
    /// **Errors**: [`Error::Invalid`] for a tensor of another type or device, or another device's stream;
    /// [`Error::Launch`] if the driver refuses the grid or the blocks; [`Error::Simulation`] for what a simulated card
    /// has found wrong.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        grid: [u32; 3],
        block: [u32; 3],
        args: P::Args<'_>,
    ) -> Result<(), Error> {
        P::check(&args, self.entry.name(), self.place)?;
        P::with(args, |params| {
            // SAFETY: the caller's promise; the values are there until the call returns.
            unsafe { self.entry.launch(stream, grid, block, params) }
        })
    }

    /// The kernel's name.
    pub fn name(&self) -> &'static str {
        self.entry.name()
    }

    /// What the driver says of the kernel; none on a simulated card.
    pub fn resources(&self) -> Option<Resources> {
        self.entry.resources()
    }

    /// Blocks of so many threads that a multiprocessor holds at a time; none where no driver says.
    pub fn blocks_per_sm(&self, threads: u32) -> Option<u32> {
        self.entry.blocks_per_sm(threads)
    }
}

impl<P> Clone for Function<P> {
    fn clone(&self) -> Self {
        Function { entry: self.entry.clone(), place: self.place, signature: PhantomData }
    }
}

impl<P> fmt::Debug for Function<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Function({} of {})", self.entry.name(), self.place)
    }
}

mod sealed {
    pub trait Sealed {}
}

/// What a kernel takes as one parameter: [`In`], [`Out`], [`ByValue`], or a scalar.
pub trait Parameter: sealed::Sealed {
    /// What a launch is given for it.
    type Arg<'a>;
    /// The same as the kernel gets it.
    #[doc(hidden)]
    type Stored: Stored;
    /// Size of the parameter.
    #[doc(hidden)]
    const BYTES: usize = size_of::<Self::Stored>();

    #[doc(hidden)]
    fn check(arg: &Self::Arg<'_>, entry: &'static str, place: Place) -> Result<(), Error>;
    #[doc(hidden)]
    fn store(arg: Self::Arg<'_>) -> Self::Stored;
}

/// A parameter's value in memory.
#[doc(hidden)]
pub trait Stored {
    fn param(&self) -> Param<'_>;
}

impl Stored for u64 {
    fn param(&self) -> Param<'_> {
        Param::Address(*self)
    }
}

/// A value that is no address.
#[doc(hidden)]
#[derive(Clone, Copy)]
#[repr(transparent)]
pub struct Value<T>(T);

impl<T: fmt::Debug> fmt::Debug for Value<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl<T: fmt::Debug + Send + Sync + 'static> abi::Params for Value<T> {}

impl<T: fmt::Debug + Send + Sync + 'static> Stored for Value<T> {
    fn param(&self) -> Param<'_> {
        Param::Struct(self)
    }
}

/// `*const T`: the first element of a tensor that the kernel reads. A launch is given a [`TensorView`]; its shape and
/// strides are the kernel's business.
#[derive(Clone, Copy, Debug)]
pub struct In<T>(PhantomData<T>);

/// `*mut T`: the first element of a tensor that the kernel writes, and may read. A launch is given a [`TensorViewMut`].
#[derive(Clone, Copy, Debug)]
pub struct Out<T>(PhantomData<T>);

/// A struct by value: `#[repr(C)]`, without padding, the same on both sides.
#[derive(Clone, Copy, Debug)]
pub struct ByValue<S>(PhantomData<S>);

macro_rules! tensor_parameter {
    ($kind:ident, $view:ident) => {
        impl<T: Element> sealed::Sealed for $kind<T> {}

        impl<T: Element> Parameter for $kind<T> {
            type Arg<'a> = $view<'a>;
            type Stored = u64;

            fn check(arg: &$view<'_>, entry: &'static str, place: Place) -> Result<(), Error> {
                if arg.dtype() != T::DTYPE {
                    return Err(Error::invalid(entry, "tensor", T::DTYPE.name(), arg.dtype().name()));
                }
                if arg.place() != place {
                    let of = |place| format!("one of {place}");
                    return Err(Error::invalid(entry, "tensor", of(place), of(arg.place())));
                }
                Ok(())
            }

            fn store(arg: $view<'_>) -> u64 {
                arg.address()
            }
        }
    };
}
tensor_parameter!(In, TensorView);
tensor_parameter!(Out, TensorViewMut);

impl<S: Pod + fmt::Debug + Send + Sync> sealed::Sealed for ByValue<S> {}

impl<S: Pod + fmt::Debug + Send + Sync> Parameter for ByValue<S> {
    type Arg<'a> = S;
    type Stored = Value<S>;

    fn check(_: &S, _: &'static str, _: Place) -> Result<(), Error> {
        Ok(())
    }

    fn store(arg: S) -> Value<S> {
        Value(arg)
    }
}

macro_rules! scalars {
    ($($scalar:ty),*) => {$(
        impl sealed::Sealed for $scalar {}

        impl Parameter for $scalar {
            type Arg<'a> = $scalar;
            type Stored = Value<$scalar>;

            fn check(_: &$scalar, _: &'static str, _: Place) -> Result<(), Error> {
                Ok(())
            }

            fn store(arg: $scalar) -> Value<$scalar> {
                Value(arg)
            }
        }
    )*};
}
scalars!(u8, i8, u16, i16, u32, i32, u64, i64, f32, f64);

/// A kernel's parameters: a tuple of up to twelve [`Parameter`]s.
pub trait Signature: sealed::Sealed {
    /// What a launch is given: a tuple of as many.
    type Args<'a>;
    /// Sizes of the parameters.
    #[doc(hidden)]
    const BYTES: &'static [usize];

    #[doc(hidden)]
    fn check(args: &Self::Args<'_>, entry: &'static str, place: Place) -> Result<(), Error>;
    #[doc(hidden)]
    fn with<R>(args: Self::Args<'_>, launch: impl FnOnce(&[Param<'_>]) -> R) -> R;
}

macro_rules! signatures {
    ($(($($parameter:ident $index:tt),*))*) => {$(
        impl<$($parameter: Parameter),*> sealed::Sealed for ($($parameter,)*) {}

        impl<$($parameter: Parameter),*> Signature for ($($parameter,)*) {
            type Args<'a> = ($($parameter::Arg<'a>,)*);
            const BYTES: &'static [usize] = &[$($parameter::BYTES),*];

            fn check(args: &Self::Args<'_>, entry: &'static str, place: Place) -> Result<(), Error> {
                $($parameter::check(&args.$index, entry, place)?;)*
                Ok(())
            }

            fn with<R>(args: Self::Args<'_>, launch: impl FnOnce(&[Param<'_>]) -> R) -> R {
                let stored = ($($parameter::store(args.$index),)*);
                launch(&[$(stored.$index.param()),*])
            }
        }
    )*};
}
signatures! {
    (A 0)
    (A 0, B 1)
    (A 0, B 1, C 2)
    (A 0, B 1, C 2, D 3)
    (A 0, B 1, C 2, D 3, E 4)
    (A 0, B 1, C 2, D 3, E 4, F 5)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10)
    (A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10, L 11)
}

/// The architecture that PTX is for, as it says; for messages.
fn target(ptx: &str) -> &str {
    let target = ptx.lines().find_map(|line| line.trim().strip_prefix(".target "));
    target.map_or("an unknown target", str::trim)
}

/// The entry points of PTX, and the sizes of the parameters of each as far as they are understood.
fn entries(ptx: &str) -> Vec<(String, Option<Vec<usize>>)> {
    let entry = |text: &str| {
        let text = text.trim_start();
        let end = text.find(|c: char| !(c.is_ascii_alphanumeric() || "_$%".contains(c)))?;
        let (name, rest) = text.split_at(end);
        let declared = match rest.trim_start().strip_prefix('(') {
            Some(rest) => rest.split(')').next()?,
            None => "",
        };
        let params = declared.split(',').map(str::trim).filter(|param| !param.is_empty());
        Some((name.to_owned(), params.map(param_bytes).collect()))
    };
    let code: Vec<&str> = ptx.lines().map(|line| line.split("//").next().unwrap_or_default()).collect();
    code.join("\n").split(".entry ").skip(1).filter_map(entry).collect()
}

/// Size of a parameter, such as `.param .align 8 .b8 name[24]`.
fn param_bytes(declared: &str) -> Option<usize> {
    let size = |word: &str| match word {
        ".u8" | ".s8" | ".b8" => Some(1),
        ".u16" | ".s16" | ".b16" | ".f16" => Some(2),
        ".u32" | ".s32" | ".b32" | ".f32" => Some(4),
        ".u64" | ".s64" | ".b64" | ".f64" => Some(8),
        _ => None,
    };
    let element: usize = declared.strip_prefix(".param")?.split_whitespace().find_map(size)?;
    match declared.split_once('[') {
        Some((_, count)) => count.strip_suffix(']')?.trim().parse().ok().and_then(|n| element.checked_mul(n)),
        None => Some(element),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simulator::tests::Script;
    use crate::{DType, Tensor};

    #[test]
    fn what_ptx_declares() {
        let ptx = "// .entry none()\n.version 6.3\n.target sm_61, debug\n.address_size 64\n\
            .visible .entry a(\n\t.param .u64 .ptr .align 1 a_param_0,\n\t.param .align 8 .b8 a_param_1[24],\n\
            \t.param .f32 a_param_2 // last\n)\n.maxntid 256, 1, 1\n{ ret; }\n\
            .entry b {\nret;\n}\n.visible .entry c_1() { ret; }\n.entry d(.param .texref t) { ret; }";
        assert_eq!(target(ptx), "sm_61, debug");
        let of = |name: &str, sizes: Option<&[usize]>| (name.to_owned(), sizes.map(<[usize]>::to_vec));
        let expected = [of("a", Some(&[8, 24, 4])), of("b", Some(&[])), of("c_1", Some(&[])), of("d", None)];
        assert_eq!(entries(ptx), expected);
        assert!(entries("").is_empty());
    }

    #[repr(C)]
    #[derive(Clone, Copy, Debug, bytemuck::Pod, bytemuck::Zeroable)]
    struct Dims {
        rows: u32,
        cols: u32,
        stride: u64,
    }

    #[test]
    fn signatures_have_sizes() {
        assert_eq!(<(In<f32>, Out<i8>, u16, f64, ByValue<Dims>)>::BYTES, [8, 8, 2, 8, 16]);
    }

    /// The values go to the card as they are, in order, and what does not fit goes nowhere.
    #[test]
    fn a_launch_on_a_simulated_card() {
        let script = Script::new((6, 1), Ok(()));
        let device = Device::simulated(script.clone()).unwrap();
        let stream = device.stream().unwrap();
        let module = Module::load(&device, "").unwrap();
        let error = module.function::<(u32,)>("softmax").unwrap_err().to_string();
        assert!(error.contains("no crate of this program has a kernel softmax"), "{error}");
        type Takes = (In<f32>, Out<f32>, u8, ByValue<Dims>);
        let function = module.function_with::<Takes>("rmsnorm_f32_x", 64).unwrap();
        assert_eq!((function.name(), function.resources()), ("rmsnorm_f32_x", None));
        let mut tensor = Tensor::zeros(&stream, &[4], DType::F32).unwrap();
        // SAFETY: nobody writes it; the script does not.
        let x = unsafe {
            TensorView::from_raw(&device, tensor.view().address(), &[4], &[1], DType::F32).unwrap()
        };
        let dims = Dims { rows: 1, cols: 4, stride: 4 };
        script.said();
        // SAFETY: the script's kernels do nothing.
        unsafe { function.launch(&stream, [3, 1, 1], [32, 1, 1], (x, tensor.view_mut(), 5, dims)) }.unwrap();
        assert_eq!(script.said(), ["rmsnorm_f32_x sm_61 [3, 1, 1] [32, 1, 1] 64 [8, 8, 1, 16]"]);

        let launch = |stream: &Stream, x: TensorView<'_>, out: TensorViewMut<'_>| {
            // SAFETY: as above.
            unsafe { function.launch(stream, [1; 3], [1; 3], (x, out, 5, dims)) }
        };
        let ints = Tensor::zeros(&Device::cpu().stream().unwrap(), &[4], DType::I32).unwrap();
        let error = launch(&stream, ints.view(), tensor.view_mut()).unwrap_err().to_string();
        assert_eq!(error, "rmsnorm_f32_x: tensor: expected f32, got i32");
        let cpu = Device::cpu().stream().unwrap();
        let mut floats = Tensor::zeros(&cpu, &[4], DType::F32).unwrap();
        let error = launch(&stream, x, floats.view_mut()).unwrap_err().to_string();
        assert!(error.ends_with("got one of the CPU"), "{error}");
        let error = launch(&cpu, x, tensor.view_mut()).unwrap_err().to_string();
        assert!(error.contains("stream: expected a stream of simulated"), "{error}");
        assert!(script.said().is_empty());
    }

    #[test]
    fn the_cpu_has_no_kernels() {
        let error = Module::load(&Device::cpu(), "").unwrap_err();
        assert!(matches!(error, Error::Unsupported { op: "Module::load", .. }), "{error}");
    }
}
