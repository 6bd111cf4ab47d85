use std::fmt;
use std::ops::Deref;
use std::str::FromStr;
use std::sync::Arc;

use host::simulator::Simulator;
use host::{Arch, Error, Image, OptLevel};

use crate::IMAGES;

/// A device that runs this build's images: the constructors are here, everything else is [`host::Device`], to which it
/// dereferences.
///
/// A type of its own because the images belong to this crate and the device to `host`, which knows no images.
#[derive(Clone, Debug)]
#[repr(transparent)]
pub struct Device(host::Device);

impl Device {
    /// The CUDA device of ordinal 0 if it can be had, else the CPU. [`Device::cuda`] says why it cannot.
    pub fn best() -> Self {
        Self::cuda(0).unwrap_or_else(|_| Self::cpu())
    }

    /// The CPU.
    pub fn cpu() -> Self {
        Device(host::Device::cpu())
    }

    /// The CUDA device of this ordinal, running the floor of this build that card and driver can run, the newest of
    /// them.
    ///
    /// **Errors**: those of [`host::Device::cuda`].
    pub fn cuda(ordinal: usize) -> Result<Self, Error> {
        // SAFETY: built by `build.rs` from this library's `gpu`, and `tests/images.rs` compares its entry points with
        // the tables.
        unsafe { host::Device::cuda(ordinal, IMAGES) }.map(Device)
    }

    /// The CUDA device of this ordinal, with other images of the operators than this build's.
    ///
    /// # Safety
    /// As for [`host::Device::cuda`]: the images' kernels take the parameters that this library gives them, and do what
    /// its kernels do.
    pub unsafe fn cuda_with_images(ordinal: usize, images: &'static [Image]) -> Result<Self, Error> {
        // SAFETY: the caller's promise.
        unsafe { host::Device::cuda(ordinal, images) }.map(Device)
    }

    /// A card that is simulated on this host: [`host::Device::simulated`].
    pub fn simulated(simulator: Arc<dyn Simulator>) -> Result<Self, Error> {
        host::Device::simulated(simulator).map(Device)
    }

    /// How many CUDA devices the driver reports.
    pub fn cuda_count() -> Result<usize, Error> {
        host::Device::cuda_count()
    }

    /// The same device, running the images of another floor: [`host::Device::with_arch`].
    pub fn with_arch(&self, arch: Arch) -> Result<Self, Error> {
        self.0.with_arch(arch).map(Device)
    }

    /// The same device, with another bound on the kernels that plans choose.
    pub fn with_level(&self, level: OptLevel) -> Self {
        Device(self.0.with_level(level))
    }
}

/// The device of a [`Stream`](crate::Stream) or a [`Model`](crate::models::Model), which runs the images that it has.
impl From<host::Device> for Device {
    fn from(device: host::Device) -> Self {
        Device(device)
    }
}

/// The same without a copy: `build(model.device().into())` where `build` takes a `&Device`.
impl<'a> From<&'a host::Device> for &'a Device {
    fn from(device: &'a host::Device) -> Self {
        // SAFETY: `Device` is `host::Device` alone, by `repr(transparent)`, and adds no rule to it.
        unsafe { &*std::ptr::from_ref(device).cast::<Device>() }
    }
}

impl Deref for Device {
    type Target = host::Device;
    fn deref(&self) -> &host::Device {
        &self.0
    }
}

/// What a user may ask for: `auto`, `cpu`, `cuda` or `cuda:N`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// [`Device::best`].
    #[default]
    Auto,
    /// [`Device::cpu`].
    Cpu,
    /// [`Device::cuda`] of this ordinal.
    Cuda(usize),
}

impl DeviceChoice {
    /// The device.
    pub fn open(self) -> Result<Device, Error> {
        match self {
            DeviceChoice::Auto => Ok(Device::best()),
            DeviceChoice::Cpu => Ok(Device::cpu()),
            DeviceChoice::Cuda(ordinal) => Device::cuda(ordinal),
        }
    }
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceChoice::Auto => f.write_str("auto"),
            DeviceChoice::Cpu => f.write_str("cpu"),
            DeviceChoice::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
        }
    }
}

impl FromStr for DeviceChoice {
    type Err = String;
    fn from_str(text: &str) -> Result<Self, String> {
        let unknown = || format!("unknown device {text:?}: expected auto, cpu, cuda or cuda:N");
        match text.split_once(':') {
            None => match text {
                "auto" => Ok(DeviceChoice::Auto),
                "cpu" => Ok(DeviceChoice::Cpu),
                "cuda" => Ok(DeviceChoice::Cuda(0)),
                _ => Err(unknown()),
            },
            Some(("cuda", ordinal)) => ordinal.parse().map(DeviceChoice::Cuda).map_err(|_| unknown()),
            Some(_) => Err(unknown()),
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::ops::rmsnorm::{NormWeight, RmsNorm, RmsNormProblem, RmsNormTile, RmsNormVariant, VARIANTS};
    use crate::{Arch, DType, Device, DeviceChoice, DeviceLimits, Error, OptLevel, TensorCores, UnknownArch};

    /// What is written is what is read.
    #[test]
    fn choices_by_name() {
        for choice in [DeviceChoice::Auto, DeviceChoice::Cpu, DeviceChoice::Cuda(3)] {
            assert_eq!(choice.to_string().parse(), Ok(choice));
        }
        assert_eq!("cuda".parse(), Ok(DeviceChoice::Cuda(0)));
        for level in [OptLevel::Basic, OptLevel::Medium, OptLevel::High] {
            assert_eq!(level.to_string().parse(), Ok(level));
        }
        #[cfg(feature = "serde")]
        {
            let written = serde_json::json!([Arch::Sm90a, DType::BF16, OptLevel::Basic]);
            assert_eq!(written.to_string(), r#"["sm_90a","bf16","basic"]"#);
            let read: (Arch, DType, OptLevel) = serde_json::from_value(written).expect("names");
            assert_eq!(read, (Arch::Sm90a, DType::BF16, OptLevel::Basic));
            let refused = serde_json::from_str::<DType>("\"f64\"").unwrap_err().to_string();
            assert!(refused.starts_with("unknown element type: expected f32, "), "{refused}");
        }
    }

    /// What signatures speak of has a name here.
    #[test]
    fn public_names() -> Result<(), Error> {
        let device = Device::cpu().with_level(OptLevel::Basic);
        let again = Device::from(device.stream()?.device().clone()).with_level(OptLevel::High);
        assert_eq!((again.place(), again.level()), (device.place(), OptLevel::High));
        // What is inside of a stream or a model is a device too.
        let level_of = |device: &Device| device.level();
        assert_eq!(level_of(device.stream()?.device().into()), OptLevel::Basic);
        let limits: Option<DeviceLimits> = device.limits();
        assert_eq!((limits, device.profile().tensor_cores), (None, TensorCores::None));
        let scalar: &'static RmsNormVariant =
            VARIANTS.iter().find(|variant| variant.tile == RmsNormTile::Scalar).expect("a row of the table");
        let (dtype, weight) = (scalar.dtype, NormWeight::Plain);
        RmsNorm::plan_with(&device, RmsNormProblem { rows: 1, cols: 8, dtype, eps: 0.0, weight }, scalar)?;
        assert!(matches!("sm_9".parse::<Arch>(), Err(UnknownArch)) && dtype != DType::U32);
        Ok(())
    }
}
