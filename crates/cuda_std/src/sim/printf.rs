//! `vprintf`: prints at once, as C's `printf` would.

use core::ffi::CStr;
use core::mem::MaybeUninit;
use std::format;
use std::string::String;

use super::access::bytes_of;

/// Prints the fields of `arguments` by `format`.
///
/// # Safety
/// The fields of `arguments` are what `format` says.
pub(crate) unsafe fn printf<A>(format: &CStr, arguments: &A) {
    // SAFETY: the caller's promise.
    std::print!("{}", unsafe { formatted(&format.to_string_lossy(), bytes_of(arguments)) });
}

/// The arguments lie one after another, each aligned to its size.
struct Arguments<'a> {
    bytes: &'a [MaybeUninit<u8>],
    at: usize,
}

impl Arguments<'_> {
    /// # Safety
    /// The next field is a `T`.
    unsafe fn next<T: Copy>(&mut self) -> T {
        let size = size_of::<T>();
        let at = self.at.next_multiple_of(size);
        self.at = at + size;
        // SAFETY: the caller's promise; the slice index checks the bounds.
        unsafe { self.bytes[at..at + size].as_ptr().cast::<T>().read_unaligned() }
    }
}

/// # Safety
/// `bytes` hold what `format` says.
unsafe fn formatted(format: &str, bytes: &[MaybeUninit<u8>]) -> String {
    let mut arguments = Arguments { bytes, at: 0 };
    let mut text = String::new();
    let mut rest = format;
    while let Some((before, directive)) = rest.split_once('%') {
        text.push_str(before);
        let end = directive.find(|c: char| c.is_ascii_alphabetic() && !"lhz".contains(c) || c == '%');
        let Some(end) = end else {
            text.push('%');
            rest = directive;
            continue;
        };
        let (flags, conversion) = (&directive[..end], directive.as_bytes()[end]);
        rest = &directive[end + 1..];
        let wide = flags.contains("ll") || flags.ends_with('l') || flags.ends_with('z');
        let numbers = flags.trim_end_matches(['l', 'h', 'z']);
        let (width, precision) = numbers.split_once('.').unwrap_or((numbers, ""));
        let zeros = width.starts_with('0');
        let (width, precision) =
            (width.parse::<usize>().unwrap_or(0), precision.parse::<usize>().unwrap_or(6));
        // SAFETY: the directive's type is the argument's — the caller.
        let value = unsafe {
            match conversion {
                b'%' => "%".into(),
                b'd' | b'i' if wide => format!("{}", arguments.next::<i64>()),
                b'd' | b'i' => format!("{}", arguments.next::<i32>()),
                b'u' if wide => format!("{}", arguments.next::<u64>()),
                b'u' => format!("{}", arguments.next::<u32>()),
                b'x' if wide => format!("{:x}", arguments.next::<u64>()),
                b'x' => format!("{:x}", arguments.next::<u32>()),
                b'c' => format!("{}", char::from_u32(arguments.next::<u32>()).unwrap_or('?')),
                b'p' => format!("{:#x}", arguments.next::<u64>()),
                b'f' | b'g' => format!("{:.precision$}", arguments.next::<f64>()),
                b'e' => format!("{:.precision$e}", arguments.next::<f64>()),
                other => format!("%{}{}", flags, other as char),
            }
        };
        text.push_str(&if zeros { format!("{value:0>width$}") } else { format!("{value:>width$}") });
    }
    text + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directives_take_their_fields() {
        #[repr(C)]
        struct Values(i32, u64, f64, u32);
        let values = Values(-3, 1 << 40, 0.5, 255);
        // SAFETY: the format names the fields' types.
        let text = unsafe { formatted("%d|%5d%%\n", bytes_of(&(-3i32, 7i32))) };
        assert_eq!(text, "-3|    7%\n");
        // SAFETY: as above.
        let text = unsafe { formatted("i %d l %llu f %.2f x %04x.", bytes_of(&values)) };
        assert_eq!(text, "i -3 l 1099511627776 f 0.50 x 00ff.");
    }
}
