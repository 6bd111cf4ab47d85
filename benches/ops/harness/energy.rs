//! Energy, from the card's own counter: NVML's total since the driver was loaded, in millijoules, of the whole board.
//!
//! The counter moves in steps of some tens of milliseconds. So power is taken between the first and the last step that
//! are seen while the card is busy with one thing alone, and a run's energy is that power times its time.

use std::ffi::OsStr;
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::Clock;
use serde_json::{Value, json};
use warpforge::Device;

/// The energy counter of one card.
pub struct Meter {
    nvml: Nvml,
    pci_bus_id: String,
}

impl Meter {
    /// The counter of this device; else why there is none.
    pub fn open(device: &Device) -> Result<Self, String> {
        let pci_bus_id = device.profile().pci_bus_id.clone().ok_or("the CPU has no counter")?;
        // The name without a number belongs to development packages, which few machines have.
        let open = |name: &str| Nvml::builder().lib_path(OsStr::new(name)).init();
        let nvml = open("libnvidia-ml.so.1")
            .or_else(|_| open("libnvidia-ml.so"))
            .map_err(|error| format!("NVML: {error}"))?;
        let meter = Meter { nvml, pci_bus_id };
        meter.millijoules().map_err(|error| format!("NVML's energy counter: {error}"))?;
        Ok(meter)
    }

    fn millijoules(&self) -> Result<u64, nvml_wrapper::error::NvmlError> {
        self.nvml.device_by_pci_bus_id(&*self.pci_bus_id)?.total_energy_consumption()
    }

    /// What a record should say of the card; null for what cannot be read.
    pub fn describe(&self) -> Value {
        let driver = self.nvml.sys_driver_version().ok();
        let Ok(device) = self.nvml.device_by_pci_bus_id(&*self.pci_bus_id) else {
            return json!({ "driver": driver });
        };
        json!({
            "driver": driver,
            "power_limit_w": device.enforced_power_limit().ok().map(|milliwatts| f64::from(milliwatts) * 1e-3),
            "max_sm_mhz": device.max_clock_info(Clock::SM).ok(),
            "max_memory_mhz": device.max_clock_info(Clock::Memory).ok(),
        })
    }

    /// Begins a measurement; the card should be busy from now on.
    pub fn begin(&self) -> Reading<'_> {
        Reading { meter: self, seen: self.millijoules().ok(), first: None, last: None }
    }
}

/// A measurement under way.
pub struct Reading<'a> {
    meter: &'a Meter,
    /// The counter when it was read last.
    seen: Option<u64>,
    /// The first and the last step that were seen.
    first: Option<(Instant, u64)>,
    last: Option<(Instant, u64)>,
}

impl Reading<'_> {
    /// Looks at the counter. Its steps are seen as late as it is looked at.
    pub fn poll(&mut self) {
        let Ok(now) = self.meter.millijoules() else { return };
        if self.seen != Some(now) {
            self.seen = Some(now);
            let step = (Instant::now(), now);
            self.first.get_or_insert(step);
            self.last = Some(step);
        }
    }

    /// Power between the first and the last step; none if they are too close to say.
    pub fn watts(&self) -> Option<f64> {
        const SHORTEST: Duration = Duration::from_millis(100);
        let ((start, before), (end, after)) = (self.first?, self.last?);
        let time = end.duration_since(start);
        (time >= SHORTEST).then(|| after.saturating_sub(before) as f64 * 1e-3 / time.as_secs_f64())
    }
}
