//! Reading PTX text, and running `ptxas` over it.

use crate::gpu::workspace_root;
use crate::sass::{Together, moves_between_products, together};
use abi::Arch;
use std::collections::BTreeMap;
use std::env;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A kernel in PTX text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its name.
    pub name: String,
    /// Its parameters in order.
    pub params: Vec<Param>,
    /// The performance directives between the parameter list and the body, such as `.maxntid 128, 1, 1`.
    pub directives: Vec<String>,
    /// The text between the braces, without comments.
    pub body: String,
}

/// A kernel parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Param {
    /// Alignment in bytes.
    pub align: usize,
    /// Size in bytes.
    pub bytes: usize,
}

/// All kernels of a PTX text, in order.
///
/// # Errors
/// Says what was expected, and in which kernel, where the text is not what a compiler writes.
pub fn entries(ptx: &str) -> Result<Vec<Entry>, String> {
    let text = without_comments(ptx);
    let mut entries = Vec::new();
    let mut rest = text.as_str();
    while let Some(at) = rest.find(".entry") {
        rest = rest[at + ".entry".len()..].trim_start();
        let end = rest.find(|c: char| !is_name(c)).unwrap_or(rest.len());
        let name = rest[..end].to_owned();
        let problem = |what: &str| format!("entry {name}: {what}");
        rest = rest[end..].trim_start();
        let mut params = Vec::new();
        if let Some(list) = rest.strip_prefix('(') {
            let close = list.find(')').ok_or_else(|| problem("no end of the parameter list"))?;
            for param in list[..close].split(',').map(str::trim).filter(|param| !param.is_empty()) {
                params.push(
                    parse_param(param).ok_or_else(|| problem(&format!("cannot read parameter {param:?}")))?,
                );
            }
            rest = &list[close + 1..];
        }
        let open = rest.find(['{', ';']).ok_or_else(|| problem("no body"))?;
        let head = &rest[..open];
        if rest[open..].starts_with(';') {
            // A declaration.
            rest = &rest[open..];
            continue;
        }
        let directives =
            head.split('.').map(str::trim).filter(|word| !word.is_empty()).map(|d| format!(".{d}"));
        let length = matching_brace(&rest[open..]).ok_or_else(|| problem("no end of the body"))?;
        let body = rest[open + 1..open + length].to_owned();
        entries.push(Entry { params, directives: directives.collect(), body, name });
        rest = &rest[open + length..];
    }
    Ok(entries)
}

/// How many statements have this opcode, with or without further suffixes: `bar.sync` counts `bar.sync` and
/// `bar.sync.aligned`, not `bar.synchronous`. A directive counts as a statement, so `.local` counts local memory.
pub fn count_instructions(body: &str, opcode: &str) -> usize {
    body.split([';', '{', '}'])
        .filter(|statement| {
            statement_opcode(statement).is_some_and(|found| {
                found.strip_prefix(opcode).is_some_and(|suffix| suffix.is_empty() || suffix.starts_with('.'))
            })
        })
        .count()
}

/// The first word behind labels and predicate.
fn statement_opcode(statement: &str) -> Option<&str> {
    statement.split_whitespace().find(|word| !word.ends_with(':') && !word.starts_with('@'))
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || "_$%".contains(c)
}

/// The text with comments turned into blanks; quotes are respected.
fn without_comments(ptx: &str) -> String {
    let mut out = String::with_capacity(ptx.len());
    let mut rest = ptx;
    while let Some(at) = rest.find(['/', '"']) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let (kept, length) = if rest.starts_with("//") {
            ("", rest.find('\n').unwrap_or(rest.len()))
        } else if let Some(comment) = rest.strip_prefix("/*") {
            (" ", comment.find("*/").map_or(rest.len(), |end| end + 4))
        } else if let Some(quoted) = rest.strip_prefix('"') {
            let length = quoted.find('"').map_or(rest.len(), |end| end + 2);
            (&rest[..length], length)
        } else {
            ("/", 1)
        };
        out.push_str(kept);
        rest = &rest[length..];
    }
    out + rest
}

/// Offset of the brace that closes the one at the start.
fn matching_brace(text: &str) -> Option<usize> {
    let mut depth = 0usize;
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            b'{' => depth += 1,
            b'}' if depth == 1 => return Some(at),
            b'}' => depth -= 1,
            _ => {}
        }
    }
    None
}

/// As `.param .u64 .ptr .global .align 16 name` or `.param .align 8 .b8 name[16]`.
fn parse_param(text: &str) -> Option<Param> {
    let mut words = text.split_whitespace().peekable();
    if words.next() != Some(".param") {
        return None;
    }
    let (mut align, mut element, mut is_pointer) = (None, None, false);
    let mut name = None;
    while let Some(word) = words.next() {
        match word {
            ".align" => {
                let bytes: usize = words.next()?.parse().ok()?;
                // Behind `.ptr` it is the alignment of what is pointed to.
                align = if is_pointer { align } else { Some(bytes) };
            }
            ".ptr" => is_pointer = true,
            _ => match word.strip_prefix('.') {
                Some(kind) => element = element.or_else(|| scalar_bytes(kind)),
                None => name = Some(word),
            },
        }
    }
    let (element, name) = (element?, name?);
    let count = match name.split_once('[') {
        Some((_, length)) => length.strip_suffix(']')?.parse().ok()?,
        None => 1,
    };
    Some(Param { align: align.unwrap_or(element), bytes: element * count })
}

/// Size of a fundamental type such as `b8` or `f32`.
fn scalar_bytes(kind: &str) -> Option<usize> {
    let bits: usize = kind.strip_prefix(['b', 'u', 's', 'f'])?.parse().ok()?;
    Some(bits / 8)
}

/// What one kernel takes of the machine, as `ptxas -v` reports it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct KernelResources {
    /// The kernel, or a function that was not inlined and has a stack frame or spills of its own.
    pub name: String,
    /// Registers per thread; 0 for functions, for which ptxas reports none.
    pub registers: u32,
    /// Bytes of stack per thread, with those of called functions where ptxas knows them.
    pub stack_bytes: u32,
    /// Bytes of spill stores.
    pub spill_stores: u32,
    /// Bytes of spill loads.
    pub spill_loads: u32,
    /// Bytes of static shared memory per block.
    pub smem_bytes: u32,
    /// What [`crate::sass::moves_between_products`] finds in its code for sm_90a.
    pub moves_between_products: Option<usize>,
    /// What [`crate::sass::together`] finds in its code.
    pub together: Together,
}

/// The assembler: `WARPFORGE_PTXAS` as it stands, else the first of the copy that `xtask` keeps under
/// `target/xtask/cuda`, `PATH`, and `/usr/local/cuda/bin`.
pub fn find_ptxas() -> Option<PathBuf> {
    if let Some(path) = env::var_os("WARPFORGE_PTXAS") {
        // Taken even if it does not exist: running it then says so, where falling back would hide a wrong path.
        return Some(path.into());
    }
    let file = format!("ptxas{}", env::consts::EXE_SUFFIX);
    let path = env::var_os("PATH").unwrap_or_default();
    let elsewhere = env::split_paths(&path).chain([PathBuf::from("/usr/local/cuda/bin")]);
    let mut elsewhere = elsewhere.map(|folder| folder.join(&file)).filter(|path| path.is_file());
    find_in_bin(&workspace_root().join("target/xtask/cuda"), &file).or_else(|| elsewhere.next())
}

/// `file` in a folder `bin` at or below `folder`; the last by name if there are several, so the newest version.
fn find_in_bin(folder: &Path, file: &str) -> Option<PathBuf> {
    let direct = folder.join("bin").join(file);
    if direct.is_file() {
        return Some(direct);
    }
    let mut below: Vec<PathBuf> = std::fs::read_dir(folder)
        .ok()?
        .flatten()
        .filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()))
        .map(|entry| entry.path())
        .collect();
    below.sort();
    below.iter().rev().find_map(|folder| find_in_bin(folder, file))
}

/// Assembles a PTX text for a floor and reports what each kernel takes, by name.
///
/// An assembler that no longer knows sm_61 (CUDA 13) assembles that text for sm_75, to which it is forward compatible.
///
/// # Errors
/// What ptxas says when it refuses the text, and its advisories that an asynchronous matrix product or `setmaxnreg`
/// loses its purpose (C7508 to C7520): the code would run, several times slower.
pub fn assemble(ptxas: &Path, ptx: &str, arch: Arch) -> Result<Vec<KernelResources>, String> {
    assemble_for(ptxas, ptx, arch, arch.name())
}

/// The same for a card that runs the floor, by the name of its architecture.
///
/// # Errors
/// As [`assemble`].
pub fn assemble_for(ptxas: &Path, ptx: &str, arch: Arch, card: &str) -> Result<Vec<KernelResources>, String> {
    let folder = tempfile::tempdir().map_err(|error| format!("no temporary folder: {error}"))?;
    let (source, cubin) = (folder.path().join("image.ptx"), folder.path().join("image.cubin"));
    std::fs::write(&source, ptx).map_err(|error| format!("{}: {error}", source.display()))?;
    let run = |target: &str| -> Result<(bool, String), String> {
        let output = Command::new(ptxas)
            .args(["-v", "-arch", target, "-o"])
            .arg(&cubin)
            .arg(&source)
            .output()
            .map_err(|error| format!("cannot run {}: {error}", ptxas.display()))?;
        let text =
            [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).concat();
        Ok((output.status.success(), text))
    };
    let mut result = run(card)?;
    if arch == Arch::Sm61 && !result.0 && result.1.contains("is not defined for option 'gpu-name'") {
        result = run("sm_75")?;
    }
    let (success, log) = result;
    let advisories: Vec<&str> = log.lines().filter(|line| is_performance_loss(line)).collect();
    match (success, advisories.is_empty()) {
        (false, _) => Err(log),
        (true, false) => Err(advisories.join("\n")),
        (true, true) => {
            let mut kernels = parse_resources(&log)?;
            let code = std::fs::read(&cubin).map_err(|error| format!("{}: {error}", cubin.display()))?;
            let other = "ptxas wrote something else than an ELF file";
            let (moves, together) =
                (moves_between_products(&code).ok_or(other)?, together(&code).ok_or(other)?);
            for kernel in &mut kernels {
                kernel.moves_between_products = moves.get(&kernel.name).copied();
                kernel.together = together.get(&kernel.name).copied().unwrap_or_default();
            }
            Ok(kernels)
        }
    }
}

/// An assembler whose results are kept below `target/ptxas`, by the text's contents, the floor and the assembler's
/// version: a kernel that has not changed costs a hash.
pub struct Assembler {
    ptxas: PathBuf,
    version: String,
    kept: PathBuf,
}

/// Changes when [`assemble`] asks for something else, or results are written otherwise.
const FORMAT: u32 = 1;

impl Assembler {
    /// That of [`find_ptxas`], if there is one.
    ///
    /// # Errors
    /// If it does not say its version.
    pub fn find() -> Result<Option<Self>, String> {
        find_ptxas().map(|ptxas| Self::new(ptxas, workspace_root().join("target/ptxas"))).transpose()
    }

    fn new(ptxas: PathBuf, kept: PathBuf) -> Result<Self, String> {
        let output = Command::new(&ptxas).arg("--version").output();
        let output = output.map_err(|error| format!("cannot run {}: {error}", ptxas.display()))?;
        Ok(Assembler { ptxas, version: String::from_utf8_lossy(&output.stdout).into_owned(), kept })
    }

    /// As [`assemble`]. What was refused is not kept.
    ///
    /// # Errors
    /// Those of [`assemble`].
    pub fn assemble(&self, ptx: &str, arch: Arch) -> Result<Vec<KernelResources>, String> {
        let path = self.kept.join(self.key(ptx, arch));
        let kept = std::fs::read_to_string(&path).ok();
        if let Some(kernels) = kept.and_then(|text| text.lines().map(parse_kept).collect()) {
            return Ok(kernels);
        }
        let kernels = assemble(&self.ptxas, ptx, arch)?;
        let text: String = kernels.iter().map(to_keep).collect();
        // Whole or not at all. Where it cannot be kept, it is found anew.
        let keep = || {
            std::fs::create_dir_all(&self.kept)?;
            let mut file = tempfile::NamedTempFile::new_in(&self.kept)?;
            file.write_all(text.as_bytes())?;
            file.persist(&path).map_err(std::io::Error::from)
        };
        if let Err(error) = keep() {
            eprintln!("{} was not kept: {error}", path.display());
        }
        Ok(kernels)
    }

    /// 128 bits, by two hashes.
    fn key(&self, ptx: &str, arch: Arch) -> String {
        let hash = |salt: u32| {
            let mut hasher = DefaultHasher::new();
            (salt, FORMAT, &self.version, arch.name(), ptx).hash(&mut hasher);
            hasher.finish()
        };
        format!("{:016x}{:016x}", hash(0), hash(1))
    }
}

/// A line of a file that is kept.
fn to_keep(kernel: &KernelResources) -> String {
    let KernelResources { name, registers, stack_bytes, spill_stores, spill_loads, smem_bytes, .. } = kernel;
    let Together { products, syncs, barriers } = kernel.together;
    let moves = kernel.moves_between_products.map_or("-".to_owned(), |moves| moves.to_string());
    format!(
        "{name} {registers} {stack_bytes} {spill_stores} {spill_loads} {smem_bytes} {moves} {products} {syncs} {barriers}\n"
    )
}

fn parse_kept(line: &str) -> Option<KernelResources> {
    let words: Vec<&str> = line.split(' ').collect();
    let [
        name,
        registers,
        stack_bytes,
        spill_stores,
        spill_loads,
        smem_bytes,
        moves,
        products,
        syncs,
        barriers,
    ] = words[..].try_into().ok()?;
    let number = |word: &str| word.parse::<u32>().ok();
    let count = |word: &str| word.parse::<usize>().ok();
    Some(KernelResources {
        name: name.to_owned(),
        registers: number(registers)?,
        stack_bytes: number(stack_bytes)?,
        spill_stores: number(spill_stores)?,
        spill_loads: number(spill_loads)?,
        smem_bytes: number(smem_bytes)?,
        moves_between_products: if moves == "-" { None } else { Some(count(moves)?) },
        together: Together { products: count(products)?, syncs: count(syncs)?, barriers: count(barriers)? },
    })
}

/// Whether a line of the log carries one of the codes C7508 to C7520.
fn is_performance_loss(line: &str) -> bool {
    let code = line.split_once("(C").and_then(|(_, rest)| rest.split_once(')'));
    code.and_then(|(digits, _)| digits.parse().ok()).is_some_and(|code: u32| (7508..=7520).contains(&code))
}

/// Reads the log of `ptxas -v`. Each kernel has three parts:
///
/// ```text
/// ptxas info    : Compiling entry function 'name' for 'sm_80'
/// ptxas info    : Function properties for name
///     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
/// ptxas info    : Used 8 registers, used 1 barriers, 1024 bytes smem, 380 bytes cmem[0]
/// ```
///
/// The middle one occurs for functions too, also alone.
fn parse_resources(log: &str) -> Result<Vec<KernelResources>, String> {
    let mut kernels: BTreeMap<&str, KernelResources> = BTreeMap::new();
    let mut functions: BTreeMap<&str, KernelResources> = BTreeMap::new();
    let (mut kernel, mut function) = ("", "");
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function '") {
            kernel = rest.split('\'').next().unwrap_or(rest);
            kernels.insert(kernel, KernelResources { name: kernel.to_owned(), ..Default::default() });
        } else if let Some((_, rest)) = line.split_once("Function properties for ") {
            function = rest.trim();
        } else if let Some(stack_bytes) = number_before(line, " bytes stack frame") {
            let of_function = || KernelResources { name: function.to_owned(), ..Default::default() };
            let row = match kernels.get_mut(function) {
                Some(row) => row,
                None => functions.entry(function).or_insert_with(of_function),
            };
            row.stack_bytes = row.stack_bytes.max(stack_bytes);
            row.spill_stores = number_before(line, " bytes spill stores").ok_or_else(|| unreadable(line))?;
            row.spill_loads = number_before(line, " bytes spill loads").ok_or_else(|| unreadable(line))?;
        } else if let Some((_, used)) = line.split_once(": Used ") {
            let row = kernels.get_mut(kernel).ok_or_else(|| unreadable(line))?;
            row.registers = number_before(used, " registers").ok_or_else(|| unreadable(line))?;
            row.smem_bytes = number_before(used, " bytes smem").unwrap_or(0);
            let cumulative = number_before(used, " bytes cumulative stack size").unwrap_or(0);
            row.stack_bytes = row.stack_bytes.max(cumulative);
        }
    }
    functions.retain(|_, row| row.stack_bytes + row.spill_stores + row.spill_loads > 0);
    Ok(kernels.into_values().chain(functions.into_values()).collect())
}

fn unreadable(line: &str) -> String {
    format!("cannot read this line of ptxas: {line:?}")
}

/// The number directly before `unit`.
fn number_before(line: &str, unit: &str) -> Option<u32> {
    let (before, _) = line.split_once(unit)?;
    let digits = before.rfind(|c: char| !c.is_ascii_digit()).map_or(0, |at| at + 1);
    before[digits..].parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gpu::skip_optional;

    const PTX: &str = r#"
.version 6.3
.target sm_61
.address_size 64
.extern .shared .align 1024 .b8 dyn[];
// .entry commented_out() { }
/* .entry also { */
.visible .entry copy_f32__t256__sm61(
	.param .u64 .ptr .global .align 16 copy_param_0,
	.param .u64 .ptr .align 1 copy_param_1,
	.param .align 8 .b8 copy_param_2[24],
	.param .u16 copy_param_3, .param .f32 copy_param_4
)
.maxntid 256, 1, 1
.minnctapersm 2
{
	.reg .pred %p<2>;
	.reg .b32 %r<8>;
	.reg .b64 %rd<6>;
	.shared .align 4 .b8 tile[1024];
	ld.param.u64 %rd1, [copy_param_0]; // the { of a comment
	ld.param.b64 %rd4, [copy_param_2+8];
	cvta.to.global.u64 %rd2, %rd1;
	setp.eq.s64 %p1, %rd4, 0;
	@%p1 bra $L_end;
	// begin inline asm
	{
	.reg .b32 t;
	ld.global.v4.b32 {%r1, %r2, %r3, t}, [%rd2];
	mov.u32 %r4, t;
	}
	// end inline asm
	mov.u32 %r5, tile;
	st.shared.u32 [%r5], %r1;
	bar.sync 0;
	ld.shared.u32 %r6, [%r5+4];
$L_store: st.global.u32 [%rd2+16], %r6;
	@!%p1 st.global.v2.u32 [%rd2+24], {%r2, %r3};
$L_end:
	ret;
}
.visible .entry empty()
{
	ret;
}
"#;

    #[test]
    fn entries_of_a_text() {
        let entries = entries(PTX).unwrap();
        let names: Vec<&str> = entries.iter().map(|entry| entry.name.as_str()).collect();
        assert_eq!(names, ["copy_f32__t256__sm61", "empty"]);
        let sizes: Vec<_> = entries[0].params.iter().map(|param| (param.align, param.bytes)).collect();
        assert_eq!(sizes, [(8, 8), (8, 8), (8, 24), (2, 2), (4, 4)]);
        assert_eq!(entries[0].directives, [".maxntid 256, 1, 1", ".minnctapersm 2"]);
        assert!(entries[0].body.trim_end().ends_with("ret;"));
        assert!(entries[1].params.is_empty() && entries[1].directives.is_empty());
        assert_eq!(entries[1].body.trim(), "ret;");
    }

    #[test]
    fn instructions_of_a_body() {
        let body = &entries(PTX).unwrap()[0].body;
        let counts = [
            ("bar.sync", 1),
            ("bar", 1),
            ("st.global", 2),
            ("st.global.v2", 1),
            ("st", 3),
            ("ld.global.v4.b32", 1),
            ("bra", 1),
            ("ret", 1),
            (".shared", 1),
            (".local", 0),
            ("mov.u32", 2),
            ("ba", 0),
            ("st.glob", 0),
        ];
        for (opcode, count) in counts {
            assert_eq!(count_instructions(body, opcode), count, "{opcode}");
        }
    }

    #[test]
    fn broken_texts_are_refused() {
        let cases = [
            (".entry k(.param .u32 p", "entry k: no end of the parameter list"),
            (".entry k(.reg .u32 p) {}", "entry k: cannot read parameter \".reg .u32 p\""),
            (".entry k(.param .b8 p[x]) {}", "entry k: cannot read parameter \".param .b8 p[x]\""),
            (".entry k(.param .u32) {}", "entry k: cannot read parameter \".param .u32\""),
            (".entry k()", "entry k: no body"),
            (".entry k() { {", "entry k: no end of the body"),
        ];
        for (ptx, message) in cases {
            assert_eq!(entries(ptx), Err(message.to_owned()));
        }
        assert_eq!(entries(".extern .entry k();\n.file 1 \"a // {.rs\"\n"), Ok(vec![]));
    }

    #[test]
    fn log_with_spills_functions_and_stack() {
        let log = "\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'big' for 'sm_90a'
ptxas info    : Function properties for big
    40 bytes stack frame, 52 bytes spill stores, 64 bytes spill loads
ptxas info    : Used 255 registers, used 3 barriers, 104 bytes cumulative stack size, 1024 bytes smem
ptxas info    : Compile time = 1.9 ms
ptxas info    : Function properties for helper
    64 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Function properties for harmless
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
";
        let rows = parse_resources(log).unwrap();
        let big = KernelResources {
            name: "big".into(),
            registers: 255,
            stack_bytes: 104,
            spill_stores: 52,
            spill_loads: 64,
            smem_bytes: 1024,
            moves_between_products: None,
            together: Together::default(),
        };
        let helper = KernelResources { name: "helper".into(), stack_bytes: 64, ..Default::default() };
        assert_eq!(rows, [big, helper]);
        let error = parse_resources("ptxas info    : Used many registers").unwrap_err();
        assert_eq!(error, "cannot read this line of ptxas: \"ptxas info    : Used many registers\"");
    }

    #[test]
    fn advisories() {
        assert!(is_performance_loss("ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async"));
        assert!(is_performance_loss("ptxas info    : (C7517) wgmma.wait_group is injected"));
        assert!(!is_performance_loss("ptxas info    : (C7600) something else"));
        assert!(!is_performance_loss("ptxas info    : Used 8 registers"));
    }

    #[test]
    fn assembler_is_found_below_bin() {
        let dir = tempfile::tempdir().unwrap();
        for version in ["12.4", "13.0"] {
            let bin = dir.path().join(version).join("nvidia/bin");
            std::fs::create_dir_all(&bin).unwrap();
            std::fs::write(bin.join("ptxas"), "").unwrap();
        }
        assert_eq!(find_in_bin(dir.path(), "ptxas"), Some(dir.path().join("13.0/nvidia/bin/ptxas")));
        assert_eq!(find_in_bin(dir.path(), "nvcc"), None);
        assert_eq!(find_in_bin(&dir.path().join("none"), "ptxas"), None);
    }

    #[test]
    fn missing_assembler_is_an_error() {
        let error = assemble(Path::new("/no/such/ptxas"), PTX, Arch::Sm80).unwrap_err();
        assert!(error.starts_with("cannot run /no/such/ptxas: "), "{error}");
    }

    /// A kernel is assembled once: then even a broken assembler of that version is not asked. Another text, floor or
    /// version is another kernel.
    #[test]
    fn results_are_kept() {
        let Some(ptxas) = find_ptxas() else { return skip_optional("no ptxas: set WARPFORGE_PTXAS") };
        let folder = tempfile::tempdir().unwrap();
        let kept = folder.path().join("kept");
        let real = Assembler::new(ptxas, kept.clone()).unwrap();
        let first = real.assemble(PTX, Arch::Sm80).unwrap();
        assert_eq!((first.len(), first[0].together.barriers), (2, 1));
        let none =
            Assembler { ptxas: "/no/such/ptxas".into(), version: real.version.clone(), kept: kept.clone() };
        assert_eq!(none.assemble(PTX, Arch::Sm80).unwrap(), first);
        assert!(none.assemble(&PTX.replace("bar.sync 0", "bar.sync 1"), Arch::Sm80).is_err());
        assert!(none.assemble(PTX, Arch::Sm90a).is_err());
        let other = Assembler { version: "another".into(), ..none };
        assert!(other.assemble(PTX, Arch::Sm80).is_err());
        // Half a file is none.
        for file in std::fs::read_dir(kept).unwrap() {
            std::fs::write(file.unwrap().path(), "copy_f32__t256__sm61 8 0").unwrap();
        }
        assert_eq!(real.assemble(PTX, Arch::Sm80).unwrap(), first);
        let spills = KernelResources {
            name: "k".into(),
            spill_loads: 7,
            moves_between_products: Some(4),
            ..first[0].clone()
        };
        assert_eq!(parse_kept(to_keep(&spills).trim_end()), Some(spills));
    }

    #[test]
    fn real_assembler() {
        let Some(ptxas) = find_ptxas() else { return skip_optional("no ptxas: set WARPFORGE_PTXAS") };
        for arch in Arch::ALL {
            let rows = assemble(&ptxas, PTX, arch).unwrap();
            assert_eq!(rows.len(), 2, "{arch}: {rows:?}");
            let copy = &rows[0];
            assert_eq!((copy.name.as_str(), copy.smem_bytes), ("copy_f32__t256__sm61", 1024));
            assert!(copy.registers > 0 && copy.stack_bytes == 0 && copy.spill_stores == 0);
        }
        let error = assemble(&ptxas, &PTX.replace("bar.sync 0", "bar.sink 0"), Arch::Sm80).unwrap_err();
        assert!(error.contains(".sink"), "{error}");

        let local = PTX.replace(
            "mov.u32 %r4, t;",
            ".local .align 4 .b8 depot[64]; mov.u64 %rd5, depot; mad.wide.u32 %rd5, t, 4, %rd5;
             st.local.u32 [%rd5], t; ld.local.u32 %r1, [%rd5+8];",
        );
        assert!(assemble(&ptxas, &local, Arch::Sm80).unwrap()[0].stack_bytes >= 64);

        let serialised = ".version 8.0\n.target sm_90a\n.address_size 64\n.visible .entry k(.param .u64 p) {
            .reg .f32 %f<5>; .reg .b64 %rd<2>;
            ld.param.u64 %rd1, [p];
            mov.f32 %f1, 0f00000000; mov.f32 %f2, %f1; mov.f32 %f3, %f1; mov.f32 %f4, %f1;
            wgmma.fence.sync.aligned;
            wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%f1,%f2,%f3,%f4}, %rd1, %rd1, 1, 1, 1, 0, 0;
            add.f32 %f1, %f1, %f2;
            wgmma.commit_group.sync.aligned; wgmma.wait_group.sync.aligned 0;
            st.global.f32 [%rd1], %f1; ret; }";
        let error = assemble(&ptxas, serialised, Arch::Sm90a).unwrap_err();
        assert!(error.contains("(C75"), "{error}");
    }
}
