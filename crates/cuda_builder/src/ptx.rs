//! What the compiler cannot say, put into the finished PTX; and its kernels one by one.

/// Turns the comments that `#[kernel]` leaves into directives of their entries, and aligns tensor maps.
///
/// A comment is `//cuda_std.kernel <entry> <directives>`; the directives go between the entry's parameter list and its
/// body. A comment without an entry is an error: the kernel was renamed on its way or optimised away.
///
/// A tensor map among the parameters must be aligned to 64 bytes; rustc knows no parameters of more than 16. It is
/// recognised by its 128 bytes at that alignment.
pub(crate) fn finish(ptx: &str) -> Result<String, String> {
    let mut pending = Vec::new();
    for line in ptx.lines() {
        if let Some(rest) = line.trim().strip_prefix("//cuda_std.kernel ") {
            let (entry, directives) =
                rest.split_once(' ').ok_or_else(|| format!("no directives in `{line}`"))?;
            pending.push((entry, directives.trim()));
        }
    }
    let mut out = String::with_capacity(ptx.len());
    let mut current: Option<usize> = None;
    let mut placed = vec![false; pending.len()];
    for line in ptx.lines() {
        let text = line.trim();
        // Comments, the attribute's own and those around each `asm!`, and empty lines are a fifth of the text.
        if text.is_empty() || text.starts_with("//") {
            continue;
        }
        if let Some(rest) = text.strip_prefix(ENTRY) {
            let name = rest.split(['(', ' ']).next().unwrap_or(rest);
            current = pending.iter().position(|&(entry, _)| entry == name);
        }
        if text == "{"
            && let Some(index) = current.take()
        {
            for directive in pending[index].1.split(" .") {
                let dot = if directive.starts_with('.') { "" } else { "." };
                out.push_str(dot);
                out.push_str(directive);
                out.push('\n');
            }
            placed[index] = true;
        }
        if text.starts_with(".param .align 16 .b8 ") && text.trim_end_matches(',').ends_with("[128]") {
            out.push_str(&line.replacen(".align 16", ".align 64", 1));
        } else {
            out.push_str(line);
        }
        out.push('\n');
    }
    match placed.iter().position(|&done| !done) {
        Some(index) => Err(format!("there is no entry {} for its launch bounds", pending[index].0)),
        None => Ok(out),
    }
}

/// What begins a kernel in finished PTX.
const ENTRY: &str = ".visible .entry ";

/// Finished PTX in parts: what stands before its kernels, and each kernel's name and text. The first part and one of
/// the others are a module, as long as the kernel calls nothing and nothing is defined between kernels. A driver that
/// gets it assembles no other kernel.
pub fn split_kernels(ptx: &str) -> (&str, Vec<(&str, &str)>) {
    let is_line = |at: &usize| *at == 0 || ptx.as_bytes()[at - 1] == b'\n';
    let starts: Vec<usize> = ptx.match_indices(ENTRY).map(|(at, _)| at).filter(is_line).collect();
    let ends = starts.iter().skip(1).copied().chain([ptx.len()]);
    let kernels = std::iter::zip(&starts, ends).map(|(&start, end)| {
        let text = &ptx[start..end];
        let name = text[ENTRY.len()..].split(['(', ' ', '\n']).next().unwrap_or_default();
        (name, text)
    });
    (&ptx[..starts.first().copied().unwrap_or(ptx.len())], kernels.collect())
}

#[cfg(test)]
mod tests {
    use super::{finish, split_kernels};

    #[test]
    fn kernels_one_by_one() {
        let head = ".version 8.0\n.extern .shared .b8 smem[];\n";
        let (a, b) = (".visible .entry a(\n)\n{\n}\n", ".visible .entry b()\n{\n // .visible .entry c\n}\n");
        assert_eq!(split_kernels(&format!("{head}{a}{b}")), (head, vec![("a", a), ("b", b)]));
        assert_eq!(split_kernels(head), (head, vec![]));
        assert_eq!(split_kernels(a), ("", vec![("a", a)]));
    }

    #[test]
    fn directives_go_before_the_body() {
        let ptx = "//cuda_std.kernel k .maxntid 256, 1, 1 .minnctapersm 2\n.visible .entry j(\n)\n{\n}\n\
                   .visible .entry k(\n\t.param .u64 k_param_0\n)\n{\n\tret;\n}\n";
        let expected = ".visible .entry j(\n)\n{\n}\n.visible .entry k(\n\t.param .u64 k_param_0\n)\n\
                        .maxntid 256, 1, 1\n.minnctapersm 2\n{\n\tret;\n}\n";
        assert_eq!(finish(ptx).as_deref(), Ok(expected));
    }

    #[test]
    fn tensor_maps_are_aligned() {
        let ptx = ".visible .entry k(\n\t.param .align 16 .b8 k_param_0[128],\n\t.param .align 16 .b8 k_param_1[32]\n)\n{\n}\n";
        let expected = ptx.replacen(".align 16", ".align 64", 1);
        assert_eq!(finish(ptx), Ok(expected));
    }

    #[test]
    fn a_lost_kernel_is_an_error() {
        let error = finish("//cuda_std.kernel gone .maxntid 32, 1, 1\n").unwrap_err();
        assert_eq!(error, "there is no entry gone for its launch bounds");
    }
}
