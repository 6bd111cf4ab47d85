//! Running other programs, and saying which.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::{env, fs};

use crate::error::Error;

/// The cargo that runs this recipe, started in `root` with `args`.
pub fn cargo(root: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.args(args).current_dir(root);
    command
}

/// The command line as one would type it, with the variables that are set for it.
pub fn line(command: &Command) -> String {
    let variables = command.get_envs().filter_map(|(name, value)| {
        value.map(|value| format!("{}={}", name.to_string_lossy(), quoted(&value.to_string_lossy())))
    });
    let program = Path::new(command.get_program());
    let program = program.file_name().unwrap_or(program.as_os_str()).to_string_lossy().into_owned();
    let args = command.get_args().map(|arg| quoted(&arg.to_string_lossy()));
    variables.chain([program]).chain(args).collect::<Vec<_>>().join(" ")
}

fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_alphanumeric() || "-_./=:,@+%".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        word.to_string()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

/// Prints the command line and runs it, with its output going where ours goes.
pub fn run(command: &mut Command) -> Result<(), Error> {
    println!("$ {}", line(command));
    let status = command.status().map_err(|source| Error::Start { command: line(command), source })?;
    if status.success() { Ok(()) } else { Err(Error::Failed { command: line(command), status }) }
}

/// Prints the command line, runs it and gives its standard output.
pub fn output(command: &mut Command) -> Result<String, Error> {
    println!("$ {}", line(command));
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .map_err(|source| Error::Start { command: line(command), source })?;
    if !output.status.success() {
        return Err(Error::Failed { command: line(command), status: output.status });
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Runs a command silently: the trimmed standard output, or in one line why there is none.
pub fn probe(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).trim().to_string());
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(complaint.lines().next().map_or_else(|| output.status.to_string(), str::to_string))
}

/// The first file of this name in the folders of `PATH`.
pub fn on_path(name: &str) -> Option<PathBuf> {
    let folders = env::var_os("PATH")?;
    env::split_paths(&folders).map(|folder| folder.join(name)).find(|file| is_program(file))
}

/// Whether this is a file that may be executed.
pub fn is_program(file: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    fs::metadata(file).is_ok_and(|about| about.is_file() && about.permissions().mode() & 0o111 != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_line_can_be_typed_again() {
        let mut command = Command::new("/opt/bin/cargo");
        command.args(["doc", "--cfg", "a b", "it's", ""]).env("RUSTDOCFLAGS", "-D warnings");
        assert_eq!(line(&command), r"RUSTDOCFLAGS='-D warnings' cargo doc --cfg 'a b' 'it'\''s' ''");
    }

    #[test]
    fn failures_carry_the_command_line() {
        let message = run(Command::new("sh").args(["-c", "exit 3"])).unwrap_err().to_string();
        assert!(message.contains("sh -c 'exit 3'") && message.contains("exit status: 3"), "{message}");
        let message = run(&mut Command::new("/no/such/program")).unwrap_err().to_string();
        assert!(message.starts_with("cannot start `program`: "), "{message}");
        assert_eq!(
            probe(Command::new("sh").args(["-c", "echo first >&2; echo second >&2; exit 1"])),
            Err("first".into())
        );
    }
}
