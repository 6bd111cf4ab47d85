//! Bytes and bits of registers.

/// `prmt.b32 d, a, b, selector;` Four bytes chosen from the eight of a (0 to 3) and b (4 to 7).
///
/// Nibble i of `selector` says which becomes byte i; its bit 3 asks for that byte's sign bit eight times instead.
#[inline(always)]
pub fn prmt(a: u32, b: u32, selector: u32) -> u32 {
    device!({
        let value: u32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("prmt.b32 {}, {}, {}, {};", out(reg32) value, in(reg32) a, in(reg32) b,
                in(reg32) selector, options(pure, nomem, nostack));
        }
        value
    } else {
        let bytes = (u64::from(a) | u64::from(b) << 32).to_le_bytes();
        u32::from_le_bytes(core::array::from_fn(|i| {
            let nibble = selector >> (4 * i);
            let byte = bytes[(nibble & 7) as usize];
            if nibble & 8 == 0 { byte } else { ((byte as i8) >> 7) as u8 }
        }))
    })
}

/// `lop3.b32 d, a, b, c, TABLE;` Any bitwise function of three: bit `4·a + 2·b + c` of `TABLE` is its value.
///
/// For `f(a, b, c)` the table is `f(0xf0, 0xcc, 0xaa)`: `(a & b) | c` is 0xea.
#[inline(always)]
pub fn lop3<const TABLE: u8>(a: u32, b: u32, c: u32) -> u32 {
    device!({
        let value: u32;
        // SAFETY: register arithmetic.
        unsafe {
            core::arch::asm!("lop3.b32 {}, {}, {}, {}, {};", out(reg32) value, in(reg32) a, in(reg32) b, in(reg32) c,
                const TABLE, options(pure, nomem, nostack));
        }
        value
    } else {
        (0..8u32).filter(|row| TABLE >> row & 1 == 1).fold(0, |value, row| {
            let term = |x: u32, bit: u32| if row >> bit & 1 == 1 { x } else { !x };
            value | term(a, 2) & term(b, 1) & term(c, 0)
        })
    })
}
