//! Mistakes that the checks of a pool find.

use std::sync::Arc;

use super::*;
use crate::memory::Block;
use crate::simulator::tests::Script;
use crate::{DType, Device, Stream, Tensor, TensorViewMut};

/// Writes where nobody may: `bytes` bytes from `offset` of a tensor that was at `address`.
fn write(stream: &Stream, address: u64, offset: i64, bytes: usize) -> Result<(), Error> {
    let to = address.wrapping_add_signed(offset);
    // SAFETY: memory of the pool, which the checks watch; nobody else uses it.
    let mut view = unsafe { TensorViewMut::from_raw(stream.device(), to, &[bytes], &[1], DType::I8)? };
    view.write(stream, &vec![7i8; bytes])
}

fn checked() -> Result<(Device, Stream), Error> {
    let device = Device::cpu();
    device.pool().start_checks();
    let stream = device.stream()?;
    Ok((device, stream))
}

/// What a tensor's user sees is as without checks.
#[test]
fn nothing_is_found_where_nothing_is_wrong() -> Result<(), Error> {
    let (device, stream) = checked()?;
    for bytes in [0, 1, 300, 5000, 3 << 20] {
        let data = vec![3i8; bytes];
        let tensor = Tensor::from_slice(&stream, &[bytes], &data)?;
        assert_eq!(tensor.view().address() % 256, 0);
        assert_eq!(tensor.try_clone(&stream)?.to_vec::<i8>(&stream)?, data);
        assert_eq!(Tensor::zeros(&stream, &[bytes], DType::I8)?.to_vec::<i8>(&stream)?, vec![0; bytes]);
    }
    device.pool().trim()?;
    let pool = device.pool().clone();
    assert_eq!((pool.stats().num_live, pool.stats().reserved_bytes), (0, 0));
    drop((device, stream));
    assert_eq!(pool.faults(), []);
    Ok(())
}

#[test]
fn the_bytes_beside_a_tensor() -> Result<(), Error> {
    let (device, stream) = checked()?;
    for (offset, bytes) in [(80, 4), (-3, 3), (80 + 255, 1), (-256, 1), (80, 256)] {
        let tensor = Tensor::empty(&stream, &[20], DType::F32)?;
        let line = line!() - 1;
        write(&stream, tensor.view().address(), offset, bytes)?;
        drop(tensor);
        let faults = device.pool().faults();
        let Some(MemoryFault::OutOfBounds { allocated, dropped, .. }) = faults.last() else {
            panic!("{faults:?}")
        };
        assert_eq!((allocated.file(), allocated.line()), (file!(), line));
        assert!(dropped.contains("the_bytes_beside_a_tensor"), "{dropped}");
        let message = faults[faults.len() - 1].to_string();
        let start = format!(
            "{bytes} byte(s) from offset {offset} of a tensor of 80 bytes were written, which are not its own; \
             allocated at {}:{line}:",
            file!()
        );
        assert!(message.starts_with(&start), "{message}");
    }
    assert_eq!(device.pool().faults().len(), 5);
    // Found once.
    device.pool().trim()?;
    assert_eq!(device.pool().faults().len(), 5);
    Ok(())
}

/// The memory of a dropped tensor is written: whoever gets any part of it finds that, or who gives it back.
#[test]
fn a_dropped_tensor_is_written() -> Result<(), Error> {
    const MIB: usize = 1 << 20;
    for (bytes, again, offset) in [(100, 100, 40), (8 * MIB, 3 * MIB, 5), (8 * MIB, 0, 5 << 20)] {
        let (device, stream) = checked()?;
        let tensor = Tensor::zeros(&stream, &[bytes], DType::I8)?;
        let (line, address) = (line!() - 1, tensor.view().address());
        drop(tensor);
        write(&stream, address, offset, 2)?;
        if again > 0 {
            drop(Tensor::empty(&stream, &[again], DType::I8)?);
        } else {
            device.pool().trim()?;
        }
        let faults = device.pool().faults();
        let [MemoryFault::UseAfterFree { allocated, dropped, .. }] = &faults[..] else {
            panic!("{faults:?}")
        };
        assert_eq!((allocated.file(), allocated.line()), (file!(), line));
        assert!(dropped.contains("a_dropped_tensor_is_written"), "{dropped}");
        let start = format!(
            "2 byte(s) from offset {offset} of a tensor of {bytes} bytes were written after it was dropped"
        );
        assert!(faults[0].to_string().starts_with(&start), "{}", faults[0]);
        device.pool().trim()?;
        assert_eq!(device.pool().faults().len(), 1);
    }
    Ok(())
}

/// Each part of a large block that is given out is looked at by itself.
#[test]
fn parts_of_a_dropped_tensor() -> Result<(), Error> {
    const MIB: usize = 1 << 20;
    let (device, stream) = checked()?;
    let tensor = Tensor::zeros(&stream, &[16 * MIB], DType::I8)?;
    let address = tensor.view().address();
    drop(tensor);
    let first = Tensor::empty(&stream, &[2 * MIB], DType::I8)?;
    let second = Tensor::empty(&stream, &[4 * MIB], DType::I8)?;
    write(&stream, address, 15 << 20, 3)?;
    drop((first, second));
    assert_eq!(device.pool().faults(), []);
    drop(Tensor::empty(&stream, &[16 * MIB], DType::I8)?);
    let faults = device.pool().faults();
    assert!(
        matches!(&faults[..], [MemoryFault::UseAfterFree { offset, changed: 3, .. }] if *offset == 15 << 20),
        "{faults:?}"
    );
    Ok(())
}

#[test]
fn tensors_that_outlive_their_device() -> Result<(), Error> {
    let (device, stream) = checked()?;
    let early = Tensor::zeros(&stream, &[10], DType::F32)?;
    let lines = [line!() + 1, line!() + 2];
    let late = Tensor::from_slice(&stream, &[3], &[1i32; 3])?;
    std::mem::forget(late.try_clone(&stream)?);
    drop(early);
    let pool = device.pool().clone();
    drop((device, stream));
    let faults = pool.faults();
    let leak = |fault: &MemoryFault| match fault {
        MemoryFault::Leak { bytes, allocated } => (*bytes, allocated.line()),
        other => panic!("{other}"),
    };
    let mut found: Vec<_> = faults.iter().map(leak).collect();
    found.sort();
    assert_eq!(found, lines.map(|line| (12, line)));
    drop(late);
    assert_eq!(pool.faults().len(), 2);
    Ok(())
}

/// What takes unsafe code outside: two values for one block.
#[test]
fn a_block_that_is_dropped_twice() -> Result<(), Error> {
    let (device, stream) = checked()?;
    let pool = device.pool();
    let block = pool.allocate(1000, stream.queue())?;
    let Block { start, guard, requested, class, piece, ref queue, .. } = block;
    let copy = Block { start, guard, requested, class, piece, queue: queue.clone(), pool: pool.clone() };
    drop(block);
    let before = pool.stats();
    drop(copy);
    assert_eq!(pool.stats(), before);
    let faults = pool.faults();
    let [MemoryFault::DoubleFree { bytes: 1000, dropped, again }] = &faults[..] else { panic!("{faults:?}") };
    assert!([dropped, again].iter().all(|site| site.contains("a_block_that_is_dropped_twice")), "{faults:?}");
    Ok(())
}

/// A tensor from before the checks has none, and memory that it leaves is nobody's fault.
#[test]
fn checks_begin_late() -> Result<(), Error> {
    let device = Device::cpu();
    let stream = device.stream()?;
    let early = Tensor::zeros(&stream, &[100], DType::F32)?;
    device.pool().start_checks();
    device.pool().start_checks();
    let address = early.view().address();
    drop(early);
    write(&stream, address, 0, 400)?;
    let late = Tensor::zeros(&stream, &[100], DType::F32)?;
    assert_eq!(late.to_vec::<f32>(&stream)?, [0.0; 100]);
    drop((late, stream));
    assert_eq!(device.pool().faults(), []);
    Ok(())
}

/// The simulator is told of the tensor's own bytes alone, and its memory is checked as the host's is.
#[test]
fn on_a_simulated_card() -> Result<(), Error> {
    let script = Script::new((8, 0), Ok(()));
    let device = Device::simulated(script.clone())?;
    device.pool().start_checks();
    let stream = device.stream()?;
    let tensor = Tensor::zeros(&stream, &[20], DType::F32)?;
    let address = tensor.view().address();
    write(&stream, address, 80, 4)?;
    drop(tensor);
    write(&stream, address, 0, 1)?;
    device.pool().trim()?;
    assert_eq!(
        script.said(),
        ["allocate 1024", "assign 4096 256 0", "assign 4352 768 80", "assign 4096 1024 0", "release 4096"]
    );
    let faults = device.pool().faults();
    assert!(
        matches!(
            &faults[..],
            [
                MemoryFault::OutOfBounds { offset: 80, changed: 4, .. },
                MemoryFault::UseAfterFree { offset: 0, changed: 1, .. }
            ]
        ),
        "{faults:?}"
    );
    Ok(())
}

/// What was freed is known by ranges, which are cut where memory is given out.
#[test]
fn ranges_of_the_ledger() {
    let mut ledger = Ledger::default();
    let dropped = Arc::new(Backtrace::disabled());
    let allocated = Location::caller();
    for (start, end) in [(0u64, 10u64), (10, 20), (30, 40)] {
        let block = Guarded { start, block_bytes: (end - start) as usize, bytes: 1 };
        let dropped = dropped.clone();
        ledger.freed.insert(start, Freed { end, block, allocated, dropped, queue: Queue::Cpu });
    }
    let mut take = |range: Range<u64>| -> Vec<_> {
        ledger.take_freed(&range).into_iter().map(|(range, freed)| (range, freed.block.start)).collect()
    };
    assert_eq!(take(22..30), []);
    assert_eq!(take(5..12), [(10..12, 10), (5..10, 0)]);
    assert_eq!(take(33..35), [(33..35, 30)]);
    assert_eq!(take(0..50), [(35..40, 30), (30..33, 30), (12..20, 10), (0..5, 0)]);
    assert_eq!(take(0..50), []);
}
