use std::fmt;
use std::str::FromStr;

use host::{Device, Error};

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
    }

    /// What signatures speak of has a name here.
    #[test]
    fn public_names() -> Result<(), Error> {
        let device = Device::cpu().with_level(OptLevel::Basic);
        // What is inside of a stream or a model is a device too.
        let level_of = |device: &Device| device.level();
        assert_eq!(level_of(device.stream()?.device()), OptLevel::Basic);
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
