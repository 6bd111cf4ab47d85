//! Bulk copies of contiguous bytes.

use super::*;

/// Checks the operands of a copy of contiguous bytes.
fn check_bulk(instruction: &str, shared: u32, other: usize, bytes: u32) -> Result<(), Failure> {
    if !(shared as usize | other | bytes as usize).is_multiple_of(16) {
        let text =
            format!("`{instruction}`: addresses and number of bytes ({bytes}) must be multiples of 16");
        return Err(Failure(Defect::Misaligned, text));
    }
    Ok(())
}

/// Contiguous bytes in pieces of 16.
fn contiguous(bytes: u32, other: impl Fn(usize) -> From) -> Vec<Piece> {
    (0..bytes as usize).step_by(16).map(|at| Piece { shared: at, global: other(at), bytes: 16 }).collect()
}

/// `cp.async.bulk` from global to shared memory.
#[track_caller]
pub(crate) fn bulk_load(shared: u32, global: *const u8, bytes: u32, barrier: u32) {
    const INSTRUCTION: &str = "cp.async.bulk.shared::cluster.global";
    let line = Location::caller();
    attempt(INSTRUCTION, line, |machine| {
        machine.needs(Need::Tma, INSTRUCTION)?;
        check_bulk(INSTRUCTION, shared, global.addr(), bytes)?;
        let pieces = contiguous(bytes, |at| From::Global(global.addr() + at));
        machine.load_pieces(INSTRUCTION, &pieces, shared, barrier, bytes, line)
    });
}

/// `cp.async.bulk.prefetch.L2`: moves nothing that a kernel could see. At any floor, since without TMA it is left out.
#[track_caller]
pub(crate) fn bulk_prefetch(global: *const u8, bytes: u32) {
    const INSTRUCTION: &str = "cp.async.bulk.prefetch.L2";
    attempt(INSTRUCTION, Location::caller(), |machine| {
        check_bulk(INSTRUCTION, 0, global.addr(), bytes)?;
        let (memory, _) = machine.memory_and_unit();
        let Some((index, offset)) = memory.find(global.addr(), bytes as usize) else {
            return Err(machine.outside(Space::Global(global.addr()), bytes as usize, Kind::Read));
        };
        match memory.buffer(index).shadow.first_forbidden(offset, bytes as usize) {
            None => Ok(()),
            Some(at) => Err(machine.forbidden(Space::Global(global.addr() + at - offset), Kind::Read)),
        }
    });
}

/// `cp.async.bulk` from this block's shared memory to another's.
#[track_caller]
pub(crate) fn bulk_copy_to_block(remote: u32, shared: u32, bytes: u32, barrier: u32) {
    const INSTRUCTION: &str = "cp.async.bulk.shared::cluster.shared::cta";
    let line = Location::caller();
    attempt(INSTRUCTION, line, |machine| {
        machine.needs(Need::Tma, INSTRUCTION)?;
        check_bulk(INSTRUCTION, shared, remote as usize, bytes)?;
        let pieces = contiguous(bytes, |at| From::Shared(shared + at as u32));
        machine.load_pieces(INSTRUCTION, &pieces, remote, barrier, bytes, line)
    });
}

fn bulk_out(
    instruction: &'static str,
    global: *mut u8,
    shared: u32,
    bytes: u32,
    combine: Combine,
    line: &'static Location<'static>,
) {
    attempt(instruction, line, |machine| {
        machine.needs(Need::Tma, instruction)?;
        check_bulk(instruction, shared, global.addr(), bytes)?;
        let pieces = contiguous(bytes, |at| From::Global(global.addr() + at));
        machine.store_pieces(&pieces, shared, combine, line)
    });
}

/// `cp.async.bulk` from shared to global memory.
#[track_caller]
pub(crate) fn bulk_store(global: *mut u8, shared: u32, bytes: u32) {
    bulk_out("cp.async.bulk.global.shared::cta", global, shared, bytes, Combine::Replace, Location::caller());
}

/// `cp.reduce.async.bulk` with f32 addition.
#[track_caller]
pub(crate) fn bulk_reduce_add_f32(global: *mut f32, shared: u32, bytes: u32) {
    let instruction = "cp.reduce.async.bulk.global.shared::cta";
    bulk_out(instruction, global.cast(), shared, bytes, Combine::AddF32, Location::caller());
}

/// `cp.async.bulk.commit_group`.
#[track_caller]
pub(crate) fn bulk_commit_group() {
    const INSTRUCTION: &str = "cp.async.bulk.commit_group";
    attempt(INSTRUCTION, Location::caller(), |machine| {
        machine.needs(Need::Tma, INSTRUCTION)?;
        let stores = &mut machine.thread().stores;
        // A group of nothing has nothing to wait for, but counts as one of the newest.
        let time = stores.agents.map_or(0, |(_, _, time)| time);
        stores.unread.push(time);
        stores.unwritten.push(time);
        stores.uncommitted = false;
        if let Some((_, _, time)) = &mut stores.agents {
            *time += 1;
        }
        Ok(())
    });
}

fn wait_for_stores(instruction: &'static str, newest: u32, until: Until, line: &'static Location<'static>) {
    attempt(instruction, line, |machine| {
        machine.needs(Need::Tma, instruction)?;
        let stores = &mut machine.thread().stores;
        let mut time = None;
        for groups in
            [Some(&mut stores.unread), Some(&mut stores.unwritten).filter(|_| until == Until::Written)]
        {
            let Some(groups) = groups else { continue };
            if let Some(done) = groups.len().checked_sub(newest as usize).filter(|&done| done > 0) {
                time = time.max(Some(groups[done - 1]));
                groups.drain(..done);
            }
        }
        let (Some(time), Some((reader, writer, _))) = (time, stores.agents) else { return Ok(()) };
        machine.finish_stores(time, until)?;
        let frame = Rc::make_mut(&mut machine.thread().clock.frame);
        frame.see_proxied(reader, time);
        if until == Until::Written {
            frame.see_proxied(writer, time);
        }
        Ok(())
    });
}

/// `cp.async.bulk.wait_group`.
#[track_caller]
pub(crate) fn bulk_wait_group(newest: u32) {
    wait_for_stores("cp.async.bulk.wait_group", newest, Until::Written, Location::caller());
}

/// `cp.async.bulk.wait_group.read`.
#[track_caller]
pub(crate) fn bulk_wait_group_read(newest: u32) {
    wait_for_stores("cp.async.bulk.wait_group.read", newest, Until::Read, Location::caller());
}
