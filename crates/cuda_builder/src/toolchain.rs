//! Finding a compiler for the device code: a rustc that still serves every floor, with the source of its own `core`.
//!
//! The device build compiles `core` for `nvptx64-nvidia-cuda`, so the sysroot must hold `lib/rustlib/src/rust/library`
//! of exactly that compiler. 1.95 and 1.96 are accepted: 1.97 dropped sm_61, and older ones are not tested here.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fmt, io};

/// A compiler that can build the device crate, and how it was found.
///
/// Having the value is the proof that its version is one of [`DeviceToolchain::VERSIONS`] and that the source of `core`
/// lies in its sysroot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceToolchain {
    /// The compiler itself, never a rustup proxy: it runs the same whatever `RUSTUP_TOOLCHAIN` says.
    pub rustc: PathBuf,
    /// The cargo that belongs to it.
    pub cargo: PathBuf,
    /// The compiler's release, for example `1.95.0`.
    pub version: String,
    /// Where it was found, in words.
    pub source: String,
}

/// Why there is no device toolchain.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ToolchainError {
    /// The folder in [`DeviceToolchain::VARIABLE`] is not usable. Nothing else was tried: a choice that was made by
    /// hand is not replaced silently.
    #[error("{}={}: {rejection}", DeviceToolchain::VARIABLE, folder.display())]
    Named {
        /// What the variable holds.
        folder: PathBuf,
        /// What is wrong with it.
        rejection: Rejection,
    },
    /// No toolchain of this machine is usable.
    #[error(
        "no toolchain here can compile the device code to PTX.\n\
         Needed: rustc 1.95 or 1.96 (1.97 no longer builds for sm_61) with the source of its standard library.\n\
         Tried:\n{}\
         Either of these gets one:\n\
         \x20 rustup toolchain install {channel} --component rust-src    (with rustup)\n\
         \x20 apt install rustc-web cargo-web rust-web-src            (Debian 12 and later)\n\
         or name a folder that has bin/rustc and bin/cargo in {variable}.",
        Tried(tried), channel = DeviceToolchain::RUSTUP_CHANNEL, variable = DeviceToolchain::VARIABLE
    )]
    NotFound {
        /// Every place that was looked at, and what was wrong with it.
        tried: Vec<(String, Rejection)>,
    },
}

/// What makes a toolchain unusable for device code.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Rejection {
    /// There is no compiler, or it does not run.
    #[error("{} does not run: {reason}", rustc.display())]
    NoRustc {
        /// The compiler that was started.
        rustc: PathBuf,
        /// What the system or the compiler said.
        reason: String,
    },
    /// The compiler is too old, or too new for sm_61.
    #[error("{} is version {found}; 1.95 or 1.96 is needed", rustc.display())]
    Version {
        /// The compiler.
        rustc: PathBuf,
        /// Its release, or what it printed in place of one.
        found: String,
    },
    /// The compiler comes without cargo.
    #[error("there is no cargo in {}", folder.display())]
    NoCargo {
        /// Where it was looked for.
        folder: PathBuf,
    },
    /// The sysroot has no library source.
    #[error("the source of the standard library is missing ({})", library.display())]
    NoLibrary {
        /// Where it should be.
        library: PathBuf,
    },
}

struct Tried<'a>(&'a [(String, Rejection)]);

impl fmt::Display for Tried<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|(place, rejection)| writeln!(f, "  {place}: {rejection}"))
    }
}

/// Runs a program and gives its trimmed standard output. The tests put another one in place of the real one.
type Ask<'a> = &'a dyn Fn(&Path, &[&str]) -> io::Result<String>;

impl DeviceToolchain {
    /// The environment variable that names a toolchain by its folder (the one that holds `bin`).
    pub const VARIABLE: &str = "WARPFORGE_DEVICE_TOOLCHAIN";
    /// The releases that are accepted, as `major.minor`.
    pub const VERSIONS: [&str; 2] = ["1.95", "1.96"];
    /// The rustup toolchain that the project pins.
    pub const RUSTUP_CHANNEL: &str = "1.95.0";

    /// Looks for a device toolchain: the folder in [`Self::VARIABLE`]; the toolchain that runs the build (`RUSTC` in a
    /// build script, else `rustc` on the path); rustup's [`Self::RUSTUP_CHANNEL`], for a build that runs on another
    /// one; a distribution's toolchain in `/usr`.
    ///
    /// # Errors
    /// [`ToolchainError::Named`] if the variable is set and its toolchain is unusable, else
    /// [`ToolchainError::NotFound`] with what is wrong with each one.
    pub fn find() -> Result<Self, ToolchainError> {
        let named = env::var_os(Self::VARIABLE).filter(|folder| !folder.is_empty()).map(PathBuf::from);
        let running = env::var_os("RUSTC").map_or_else(|| PathBuf::from("rustc"), PathBuf::from);
        Self::find_among(named, &running, Path::new("/usr"), &ask)
    }

    fn find_among(
        named: Option<PathBuf>,
        running: &Path,
        distribution: &Path,
        ask: Ask<'_>,
    ) -> Result<Self, ToolchainError> {
        if let Some(folder) = named {
            let rustc = in_bin(&folder, "rustc");
            return Self::check(&rustc, &format!("named by {}", Self::VARIABLE), ask)
                .map_err(|rejection| ToolchainError::Named { folder, rejection });
        }
        let rustup = Path::new("rustup");
        let pinned = ask(rustup, &["which", "--toolchain", Self::RUSTUP_CHANNEL, "rustc"])
            .map(PathBuf::from)
            .map_err(|error| Rejection::NoRustc { rustc: rustup.into(), reason: error.to_string() });
        let places = [
            ("the toolchain that runs the build".to_string(), Ok(running.to_path_buf())),
            (format!("rustup's {}", Self::RUSTUP_CHANNEL), pinned),
            (
                format!("the distribution's toolchain in {}", distribution.display()),
                Ok(in_bin(distribution, "rustc")),
            ),
        ];
        let mut tried: Vec<(String, Rejection)> = Vec::new();
        for (place, rustc) in places {
            match rustc.and_then(|rustc| Self::check(&rustc, &place, ask)) {
                Ok(toolchain) => return Ok(toolchain),
                // The running toolchain is often rustup's pinned one: once in the message is enough.
                Err(rejection) if tried.iter().any(|(_, known)| *known == rejection) => {}
                Err(rejection) => tried.push((place, rejection)),
            }
        }
        Err(ToolchainError::NotFound { tried })
    }

    /// Resolves `rustc`, which may be a rustup proxy, to the compiler behind it, and checks that one.
    fn check(rustc: &Path, source: &str, ask: Ask<'_>) -> Result<Self, Rejection> {
        let run = |rustc: &Path, args: &[&str]| {
            ask(rustc, args)
                .map_err(|error| Rejection::NoRustc { rustc: rustc.into(), reason: error.to_string() })
        };
        let sysroot = PathBuf::from(run(rustc, &["--print", "sysroot"])?);
        // Some distributions keep the compiler outside its sysroot.
        let beside = |name: &str| {
            let own = in_bin(&sysroot, name);
            if own.is_file() {
                own
            } else {
                rustc.with_file_name(format!("{name}{}", env::consts::EXE_SUFFIX))
            }
        };
        let (rustc, cargo) = (beside("rustc"), beside("cargo"));

        let about = run(&rustc, &["-vV"])?;
        let version =
            about.lines().find_map(|line| line.strip_prefix("release: ")).unwrap_or(&about).to_string();
        let is_release_of =
            |minor: &str| version.strip_prefix(minor).is_some_and(|rest| rest.starts_with('.'));
        if !Self::VERSIONS.into_iter().any(is_release_of) {
            return Err(Rejection::Version { rustc, found: version });
        }
        if !cargo.is_file() {
            return Err(Rejection::NoCargo { folder: cargo.parent().unwrap_or(&sysroot).to_path_buf() });
        }
        let library = sysroot.join("lib/rustlib/src/rust/library");
        if !library.join("core/src/lib.rs").is_file() {
            return Err(Rejection::NoLibrary { library });
        }
        Ok(Self { rustc, cargo, version, source: source.to_string() })
    }
}

fn in_bin(folder: &Path, name: &str) -> PathBuf {
    folder.join("bin").join(format!("{name}{}", env::consts::EXE_SUFFIX))
}

/// The trimmed output of a program; a failure carries its first line of complaint.
fn ask(program: &Path, args: &[&str]) -> io::Result<String> {
    // A proxy may install a missing toolchain by itself: looking for one must not change the machine.
    let output = Command::new(program).args(args).env("RUSTUP_AUTO_INSTALL", "0").output()?;
    if !output.status.success() {
        let complaint = String::from_utf8_lossy(&output.stderr);
        return Err(io::Error::other(match complaint.lines().next() {
            Some(line) if !line.is_empty() => line.to_string(),
            _ => output.status.to_string(),
        }));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// A folder of empty toolchain files that is removed at the end.
    struct Machine(PathBuf);

    impl Machine {
        fn new() -> Self {
            static COUNT: AtomicUsize = AtomicUsize::new(0);
            let name =
                format!("cuda_builder-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed));
            let root = env::temp_dir().join(name);
            fs::create_dir_all(&root).unwrap();
            Self(root)
        }

        /// Lays out a toolchain of the given parts; its version is what [`Self::ask`] reads back.
        fn with(self, name: &str, version: &str, parts: &[&str]) -> Self {
            let folder = self.0.join(name);
            for part in parts {
                let file = folder.join(part);
                fs::create_dir_all(file.parent().unwrap()).unwrap();
                fs::write(file, "").unwrap();
            }
            fs::write(folder.join("version"), version).unwrap();
            self
        }

        /// Answers for the compilers of this machine. `rustc` alone is a proxy for the toolchain `running`, and rustup
        /// knows the toolchain `pinned`.
        fn ask(&self, program: &Path, args: &[&str]) -> io::Result<String> {
            if program == Path::new("rustup") {
                let rustc = self.0.join("pinned/bin/rustc");
                return if rustc.exists() {
                    Ok(rustc.display().to_string())
                } else {
                    Err(io::Error::other("toolchain is not installed"))
                };
            }
            let folder = match program == Path::new("rustc") {
                true => self.0.join("running"),
                false => program.ancestors().nth(2).unwrap().to_path_buf(),
            };
            match args {
                ["--print", "sysroot"] if folder.join("bin/rustc").exists() => {
                    Ok(folder.display().to_string())
                }
                ["-vV"] => Ok(format!(
                    "rustc\nrelease: {}\nLLVM version: 22",
                    fs::read_to_string(folder.join("version"))?
                )),
                _ => Err(io::Error::from(io::ErrorKind::NotFound)),
            }
        }

        fn find(&self, named: Option<&str>) -> Result<DeviceToolchain, ToolchainError> {
            DeviceToolchain::find_among(
                named.map(|name| self.0.join(name)),
                Path::new("rustc"),
                &self.0.join("usr"),
                &|program, args| self.ask(program, args),
            )
        }
    }

    impl Drop for Machine {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const BARE: &[&str] = &["bin/rustc", "bin/cargo"];
    const FULL: &[&str] = &["bin/rustc", "bin/cargo", "lib/rustlib/src/rust/library/core/src/lib.rs"];

    #[test]
    fn running_toolchain_is_resolved_behind_its_proxy() {
        let machine = Machine::new().with("running", "1.95.0", FULL).with("usr", "1.96.0", FULL);
        let found = machine.find(None).unwrap();
        assert_eq!(found.rustc, machine.0.join("running/bin/rustc"));
        assert_eq!(found.cargo, machine.0.join("running/bin/cargo"));
        assert_eq!(
            (found.version.as_str(), found.source.as_str()),
            ("1.95.0", "the toolchain that runs the build")
        );
    }

    #[test]
    fn a_toolchain_without_library_source_is_passed_over() {
        let machine = Machine::new().with("running", "1.95.0", BARE).with("usr", "1.96.0", FULL);
        assert_eq!(machine.find(None).unwrap().rustc, machine.0.join("usr/bin/rustc"));
    }

    #[test]
    fn a_build_on_a_newer_compiler_falls_back_to_the_pinned_one() {
        let machine = Machine::new()
            .with("running", "1.97.0", FULL)
            .with("pinned", "1.95.0", FULL)
            .with("usr", "1.96.0", FULL);
        let found = machine.find(None).unwrap();
        assert_eq!((found.version.as_str(), found.source.as_str()), ("1.95.0", "rustup's 1.95.0"));
    }

    #[test]
    fn only_the_two_releases_are_accepted() {
        for (version, accepted) in [
            ("1.94.1", false),
            ("1.95.0", true),
            ("1.95.1", true),
            ("1.96.0", true),
            ("1.97.0-nightly", false),
            ("1.9.5", false),
            ("1.950.0", false),
        ] {
            let machine = Machine::new().with("running", version, FULL);
            assert_eq!(machine.find(None).is_ok(), accepted, "{version}");
        }
    }

    #[test]
    fn a_named_toolchain_comes_first_and_is_never_replaced() {
        let machine = Machine::new()
            .with("mine", "1.96.1", FULL)
            .with("old", "1.80.0", FULL)
            .with("running", "1.95.0", FULL);
        assert_eq!(machine.find(Some("mine")).unwrap().rustc, machine.0.join("mine/bin/rustc"));

        let message = machine.find(Some("old")).unwrap_err().to_string();
        let expected = "bin/rustc is version 1.80.0; 1.95 or 1.96 is needed";
        assert!(
            message.starts_with("WARPFORGE_DEVICE_TOOLCHAIN=") && message.ends_with(expected),
            "{message}"
        );

        let message = machine.find(Some("nowhere")).unwrap_err().to_string();
        assert!(message.contains("nowhere/bin/rustc does not run: "), "{message}");
    }

    #[test]
    fn the_error_says_what_is_wrong_and_names_both_ways() {
        let machine = Machine::new().with("running", "1.97.0", FULL).with("pinned", "1.95.0", BARE).with(
            "usr",
            "1.96.0",
            &["bin/rustc", "lib/rustlib/src/rust/library/core/src/lib.rs"],
        );
        let message = machine.find(None).unwrap_err().to_string();
        for part in [
            "the toolchain that runs the build: ",
            "running/bin/rustc is version 1.97.0; 1.95 or 1.96 is needed\n",
            "rustup's 1.95.0: the source of the standard library is missing (",
            "usr: there is no cargo in ",
            "rustup toolchain install 1.95.0 --component rust-src",
            "apt install rustc-web cargo-web rust-web-src",
            "WARPFORGE_DEVICE_TOOLCHAIN",
            "1.97 no longer builds for sm_61",
        ] {
            assert!(message.contains(part), "{part:?} is not in:\n{message}");
        }
    }

    #[test]
    fn one_toolchain_in_two_places_is_reported_once() {
        let machine = Machine::new().with("running", "1.95.0", BARE);
        let ask = |program: &Path, args: &[&str]| match program == Path::new("rustup") {
            true => Ok(machine.0.join("running/bin/rustc").display().to_string()),
            false => machine.ask(program, args),
        };
        let found =
            DeviceToolchain::find_among(None, Path::new("rustc"), &machine.0.join("usr"), &ask).unwrap_err();
        let ToolchainError::NotFound { tried } = found else { panic!("{found}") };
        assert_eq!(tried.len(), 2, "{tried:?}");
    }

    #[test]
    fn this_machine_gives_a_toolchain_or_the_whole_message() {
        match DeviceToolchain::find() {
            Ok(found) => assert!(found.rustc.is_file() && found.cargo.is_file(), "{found:?}"),
            Err(ToolchainError::Named { .. }) => assert!(env::var_os(DeviceToolchain::VARIABLE).is_some()),
            Err(error @ ToolchainError::NotFound { .. }) => {
                assert!(error.to_string().contains("rust-src"), "{error}")
            }
        }
    }
}
