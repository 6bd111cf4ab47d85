//! The PTX images that a build embeds.

use std::borrow::Cow;

use abi::Arch;

use crate::error::Error;

/// The PTX of one operator family for one architecture floor.
#[derive(Clone, Copy)]
pub struct Image {
    /// The operator family, which is the name of the operator's modules.
    pub family: &'static str,
    /// The floor that it was compiled for.
    pub arch: Arch,
    /// The PTX.
    pub ptx: Ptx,
}

/// PTX as a build embeds it.
#[derive(Clone, Copy)]
pub enum Ptx {
    /// As text, whose kernels are loaded together.
    Text(&'static str),
    /// Kernel by kernel, each loaded when it is first wanted, so that a driver assembles no others.
    Kernels {
        /// The compiler that made it; of a published crate also the commit that it was made from.
        origin: &'static str,
        /// What stands before the kernels.
        head: &'static str,
        /// They.
        kernels: &'static [EmbeddedKernel],
    },
}

/// A kernel as a build embeds it, in raw DEFLATE streams (RFC 1951): a twentieth of the size.
#[derive(Clone, Copy)]
pub struct EmbeddedKernel {
    /// Its name.
    pub name: &'static str,
    /// Its text, behind the image's head.
    pub ptx: &'static [u8],
    /// Its machine code for the cards of the floor's own generation, of which the driver assembles nothing; a published
    /// crate has it.
    pub cubin: Option<&'static [u8]>,
}

impl std::fmt::Debug for Ptx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Not megabytes of text.
        match self {
            Ptx::Text(text) => write!(f, "Text({} bytes)", text.len()),
            Ptx::Kernels { kernels, .. } => write!(f, "Kernels({})", kernels.len()),
        }
    }
}

impl std::fmt::Debug for PtxModule {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PtxModule({})", self.name)
    }
}

impl std::fmt::Debug for Image {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Image({} {})", self.family, self.arch)
    }
}

impl Image {
    /// What a device loads, each by itself: the kernels, or all of them where they are one text.
    pub fn modules(&self) -> impl Iterator<Item = PtxModule> + use<> {
        let head = self.head();
        let (whole, kernels) = match self.ptx {
            Ptx::Text(_) => (Some(PtxModule { name: self.family, head, kernel: None }), &[][..]),
            Ptx::Kernels { kernels, .. } => (None, kernels),
        };
        let kernel =
            move |kernel: &EmbeddedKernel| PtxModule { name: kernel.name, head, kernel: Some(*kernel) };
        whole.into_iter().chain(kernels.iter().map(kernel))
    }

    /// What a device loads for a kernel. **Errors**: [`Error::Invalid`] if the image's kernels are known and it is none
    /// of them.
    pub fn module_of(&self, kernel: &str) -> Result<PtxModule, Error> {
        let holds = |module: &PtxModule| module.kernel.is_none() || module.name == kernel;
        let found = self.modules().find(holds);
        found.ok_or_else(|| {
            Error::invalid(self.family, "kernel", format!("one of the image for {}", self.arch), kernel)
        })
    }

    /// The beginning of the text; all of it where that is one.
    fn head(&self) -> &'static str {
        match self.ptx {
            Ptx::Text(text) => text,
            Ptx::Kernels { head, .. } => head,
        }
    }

    /// What made it, where that is known: the compiler, and of a published crate the commit.
    pub fn origin(&self) -> Option<&'static str> {
        match self.ptx {
            Ptx::Text(_) => None,
            Ptx::Kernels { origin, .. } => Some(origin.trim_ascii_end()),
        }
    }

    /// The PTX version, from the `.version` line.
    pub fn ptx_version(&self) -> Option<(u32, u32)> {
        let text = self.head();
        let line = text.lines().find_map(|line| line.trim().strip_prefix(".version "))?;
        let (major, minor) = line.trim().split_once('.')?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }

    /// The first CUDA version whose driver takes this PTX version, and that driver's branch.
    ///
    /// Source: the release notes table of the PTX ISA manual, and the CUDA release notes' driver table.
    pub fn needed_driver(&self) -> Option<NeededDriver> {
        /// PTX version, and the first driver that takes it.
        const TABLE: &[([u32; 2], NeededDriver)] = &[
            ([6, 3], driver(10, 0, 410)),
            ([6, 4], driver(10, 1, 418)),
            ([6, 5], driver(10, 2, 440)),
            ([7, 0], driver(11, 0, 450)),
            ([7, 1], driver(11, 1, 455)),
            ([7, 2], driver(11, 2, 460)),
            ([7, 3], driver(11, 3, 465)),
            ([7, 4], driver(11, 4, 470)),
            ([7, 5], driver(11, 5, 495)),
            ([7, 6], driver(11, 6, 510)),
            ([7, 7], driver(11, 7, 515)),
            ([7, 8], driver(11, 8, 520)),
            ([8, 0], driver(12, 0, 525)),
            ([8, 1], driver(12, 1, 530)),
            ([8, 2], driver(12, 2, 535)),
            ([8, 3], driver(12, 3, 545)),
            ([8, 4], driver(12, 4, 550)),
            ([8, 5], driver(12, 5, 555)),
            ([8, 6], driver(12, 7, 565)),
            ([8, 7], driver(12, 8, 570)),
        ];
        const fn driver(major: u32, minor: u32, branch: u32) -> NeededDriver {
            NeededDriver { cuda: (major, minor), branch }
        }
        let version = self.ptx_version()?;
        TABLE.iter().find(|(ptx, _)| *ptx >= [version.0, version.1]).map(|&(_, driver)| driver)
    }

    /// An error if a driver that supports CUDA `found` (major, minor) is too old for the PTX version.
    pub(crate) fn check_driver(&self, found: (u32, u32)) -> Result<(), Error> {
        let (Some(version), Some(needed)) = (self.ptx_version(), self.needed_driver()) else { return Ok(()) };
        if found >= needed.cuda {
            return Ok(());
        }
        Err(Error::DriverTooOld {
            family: self.family,
            arch: self.arch,
            ptx_major: version.0,
            ptx_minor: version.1,
            needed_major: needed.cuda.0,
            needed_minor: needed.cuda.1,
            branch: needed.branch,
            found_major: found.0,
            found_minor: found.1,
        })
    }
}

/// Images of a program, which a crate that embeds them enters by `inventory::submit!`:
/// [`Device::cuda`](crate::Device::cuda) runs them.
#[derive(Clone, Copy, Debug)]
pub struct ProgramImages(&'static [Image]);

inventory::collect!(ProgramImages);

impl ProgramImages {
    /// # Safety
    /// As for [`Device::cuda_with_images`](crate::Device::cuda_with_images): the kernels are what the operators take
    /// them for.
    pub const unsafe fn new(images: &'static [Image]) -> Self {
        ProgramImages(images)
    }

    /// Those of this program; none where no crate has entered any.
    pub(crate) fn entered() -> &'static [Image] {
        inventory::iter::<ProgramImages>().next().map_or(&[], |entered| entered.0)
    }
}

/// The preferred floor among the images that a card of this compute capability runs, of those whose PTX its driver
/// takes; none if it runs no image. **Errors**: [`Error::DriverTooOld`] if the driver takes none of them.
pub(crate) fn preferred_floor(
    images: &[Image],
    (major, minor): (u32, u32),
    driver: (u32, u32),
) -> Result<Option<Arch>, Error> {
    let mut refused = Ok(());
    for arch in Arch::PREFERRED.into_iter().filter(|arch| arch.runs_on(major, minor)) {
        for image in images.iter().filter(|image| image.arch == arch) {
            match image.check_driver(driver) {
                Ok(()) => return Ok(Some(arch)),
                error => refused = error,
            }
        }
    }
    refused.map(|()| None)
}

/// PTX that a device loads at a time.
#[derive(Clone, Copy)]
pub struct PtxModule {
    /// The kernel's name, or the family's where all kernels are one text.
    pub name: &'static str,
    head: &'static str,
    kernel: Option<EmbeddedKernel>,
}

impl PtxModule {
    /// The text. **Errors**: [`Error::Invalid`] if it was deflated and is damaged.
    pub fn text(&self) -> Result<Cow<'static, str>, Error> {
        let Some(kernel) = self.kernel else { return Ok(self.head.into()) };
        let text = self.inflate("ptx", kernel.ptx)?;
        let text = String::from_utf8(text).map_err(|error| self.damaged("ptx", error.to_string()))?;
        Ok(Cow::Owned(self.head.to_owned() + &text))
    }

    /// Its machine code, if the build has it. **Errors**: [`Error::Invalid`] if it is damaged.
    pub fn cubin(&self) -> Result<Option<Vec<u8>>, Error> {
        let cubin = self.kernel.and_then(|kernel| kernel.cubin);
        cubin.map(|cubin| self.inflate("cubin", cubin)).transpose()
    }

    fn inflate(&self, argument: &'static str, deflated: &[u8]) -> Result<Vec<u8>, Error> {
        let inflated = miniz_oxide::inflate::decompress_to_vec(deflated);
        inflated.map_err(|error| self.damaged(argument, error.to_string()))
    }

    fn damaged(&self, argument: &'static str, reason: String) -> Error {
        Error::invalid(self.name, argument, format!("deflated {argument}"), reason)
    }
}

/// Whether machine code for a floor runs on a card of this compute capability: within a generation, and of Hopper's
/// special instructions there alone.
#[cfg(any(feature = "cuda", test))]
pub(crate) fn cubin_runs_on(arch: Arch, (major, minor): (u32, u32)) -> bool {
    let generation = match arch {
        Arch::Sm61 => 6,
        Arch::Sm80 => 8,
        Arch::Sm90a => 9,
        Arch::Sm100 => 10,
    };
    major == generation && arch.runs_on(major, minor)
}

/// A driver that takes an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NeededDriver {
    /// The CUDA version that it supports at least: major, minor.
    pub cuda: (u32, u32),
    /// The first driver branch of that version.
    pub branch: u32,
}

#[cfg(test)]
mod tests {
    use super::{EmbeddedKernel, Image, NeededDriver, Ptx, cubin_runs_on, preferred_floor};
    use crate::error::Error;
    use abi::Arch;

    #[test]
    fn needed_driver_of_the_three_floors() {
        let needed = |ptx| Image { family: "f", arch: Arch::Sm61, ptx: Ptx::Text(ptx) }.needed_driver();
        assert_eq!(
            needed("//\n.version 6.3\n.target sm_61\n"),
            Some(NeededDriver { cuda: (10, 0), branch: 410 })
        );
        assert_eq!(needed(".version 7.4\n"), Some(NeededDriver { cuda: (11, 4), branch: 470 }));
        assert_eq!(needed(".version 8.0\n"), Some(NeededDriver { cuda: (12, 0), branch: 525 }));
        assert_eq!(needed("no version"), None);
    }

    #[test]
    fn an_old_driver_is_told_which_one_is_needed() {
        let image = Image { family: "rmsnorm", arch: Arch::Sm90a, ptx: Ptx::Text(".version 8.0\n") };
        assert!(image.check_driver((12, 0)).is_ok());
        assert!(image.check_driver((13, 0)).is_ok());
        assert_eq!(
            image.check_driver((11, 8)).unwrap_err().to_string(),
            "image rmsnorm for sm_90a is PTX 8.0, which needs a CUDA 12.0 driver (branch 525 or later); the installed \
             driver supports CUDA 11.8"
        );
    }

    /// A driver that is too old for the card's own floor runs an older one.
    #[test]
    fn the_preferred_floor_is_one_that_card_and_driver_run() {
        let image = |arch, text| Image { family: "rmsnorm", arch, ptx: Ptx::Text(text) };
        let images = [
            image(Arch::Sm80, ".version 7.4\n"),
            image(Arch::Sm90a, ".version 8.0\n"),
            image(Arch::Sm61, ".version 6.3\n"),
        ];
        for (capability, driver, expected) in [
            ((9, 0), (12, 0), Some(Arch::Sm90a)),
            ((9, 0), (11, 8), Some(Arch::Sm80)),
            ((8, 9), (13, 0), Some(Arch::Sm80)),
            ((8, 0), (11, 3), Some(Arch::Sm61)),
            ((6, 1), (12, 0), Some(Arch::Sm61)),
            ((6, 0), (12, 0), None),
        ] {
            let got = preferred_floor(&images, capability, driver).unwrap();
            assert_eq!(got, expected, "{capability:?} with {driver:?}");
        }
        assert_eq!(preferred_floor(&[], (9, 0), (12, 0)).unwrap(), None);
        let error = preferred_floor(&images[1..2], (9, 0), (11, 8)).unwrap_err();
        assert!(matches!(error, Error::DriverTooOld { needed_major: 12, .. }), "{error}");
    }

    #[test]
    fn kernels_are_modules_of_their_own() {
        let ret = miniz_oxide::deflate::compress_to_vec(b".visible .entry a() { ret; }", 6);
        let cubin = miniz_oxide::deflate::compress_to_vec(b"\x7fELF...", 6);
        let leak = |bytes: Vec<u8>| &*Box::leak(bytes.into_boxed_slice());
        let kernels: &[_] = Box::leak(Box::new([
            EmbeddedKernel { name: "a", ptx: leak(ret), cubin: Some(leak(cubin)) },
            EmbeddedKernel { name: "b", ptx: &[0xff, 1, 2], cubin: None },
        ]));
        let ptx = Ptx::Kernels { origin: "rustc 1.95.0\n", head: ".version 8.0\n", kernels };
        let image = Image { family: "f", arch: Arch::Sm90a, ptx };
        assert_eq!((image.ptx_version(), image.origin()), (Some((8, 0)), Some("rustc 1.95.0")));
        assert_eq!(format!("{ptx:?} {:?}", image.modules().next()), "Kernels(2) Some(PtxModule(a))");
        assert_eq!(image.modules().map(|module| module.name).collect::<Vec<_>>(), ["a", "b"]);
        let text = image.module_of("a").unwrap().text().unwrap();
        assert_eq!(text, ".version 8.0\n.visible .entry a() { ret; }");
        assert_eq!(image.module_of("a").unwrap().cubin().unwrap().as_deref(), Some(&b"\x7fELF..."[..]));
        assert_eq!(image.module_of("b").unwrap().cubin().unwrap(), None);
        let message = image.module_of("b").unwrap().text().unwrap_err().to_string();
        assert!(message.starts_with("b: ptx: expected deflated ptx, got "), "{message}");
        let message = image.module_of("c").unwrap_err().to_string();
        assert_eq!(message, "f: kernel: expected one of the image for sm_90a, got c");
    }

    #[test]
    fn machine_code_runs_within_its_generation() {
        for (arch, runs, others) in [
            (Arch::Sm61, &[(6, 1), (6, 2)][..], &[(6, 0), (7, 0), (8, 0)][..]),
            (Arch::Sm80, &[(8, 0), (8, 6), (8, 9)], &[(9, 0), (12, 0), (7, 5)]),
            (Arch::Sm90a, &[(9, 0)], &[(10, 0), (8, 9)]),
        ] {
            assert!(runs.iter().all(|&card| cubin_runs_on(arch, card)), "{arch}");
            assert!(!others.iter().any(|&card| cubin_runs_on(arch, card)), "{arch}");
        }
    }

    #[test]
    fn one_text_is_one_module() {
        let image = Image { family: "f", arch: Arch::Sm61, ptx: Ptx::Text(".version 6.3\n") };
        assert_eq!(format!("{:?}", image.ptx), "Text(13 bytes)");
        let module = image.module_of("a").unwrap();
        assert_eq!((module.name, &*module.text().unwrap()), ("f", ".version 6.3\n"));
    }
}
