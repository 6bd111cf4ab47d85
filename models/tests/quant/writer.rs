//! Writes GGUF files.

use models::GgmlType;

/// A value of the metadata.
#[derive(Clone, Debug)]
pub enum Kv {
    U32(u32),
    F32(f32),
    Bool(bool),
    Text(String),
    Texts(Vec<String>),
    I32s(Vec<i32>),
    Bools(Vec<bool>),
}

/// What a file has, in order.
#[derive(Clone, Debug, Default)]
pub struct Writer {
    pub metadata: Vec<(String, Kv)>,
    pub tensors: Vec<Tensor>,
}

#[derive(Clone, Debug)]
pub struct Tensor {
    pub name: String,
    /// Outermost first.
    pub shape: Vec<usize>,
    /// ggml's number of the type.
    pub kind: u32,
    pub bytes: Vec<u8>,
}

pub fn text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u64).to_le_bytes());
    out.extend(text.as_bytes());
}

impl Writer {
    pub fn new(architecture: &str) -> Self {
        let mut writer = Writer::default();
        writer.text("general.architecture", architecture);
        writer
    }

    pub fn set(&mut self, key: &str, value: Kv) {
        self.metadata.push((key.into(), value));
    }

    pub fn text(&mut self, key: &str, value: &str) {
        self.set(key, Kv::Text(value.into()));
    }

    /// Numbers of the architecture.
    pub fn numbers(&mut self, prefix: &str, numbers: &[(&str, u32)]) {
        for (key, number) in numbers {
            self.set(&format!("{prefix}.{key}"), Kv::U32(*number));
        }
    }

    /// A tensor of f32.
    pub fn floats(&mut self, name: &str, shape: &[usize], values: &[f32]) {
        assert_eq!(shape.iter().product::<usize>(), values.len(), "{name}");
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensors.push(Tensor { name: name.into(), shape: shape.into(), kind: 0, bytes });
    }

    /// A matrix of this type: rounded to the nearest, by the largest value of each block.
    pub fn matrix(&mut self, name: &str, kind: GgmlType, cols: usize, values: &[f32]) {
        let shape = vec![values.len() / cols, cols];
        let block = |values: &[f32], most: f32| -> (Vec<u8>, Vec<i32>) {
            let largest = values.iter().fold(0.0f32, |largest, value| largest.max(value.abs()));
            let scale = half::f16::from_f32(largest / most);
            let codes = values.iter().map(|value| (value / scale.to_f32()).round() as i32).collect();
            (scale.to_le_bytes().to_vec(), codes)
        };
        let (number, bytes) = match kind {
            GgmlType::F32 => return self.floats(name, &shape, values),
            GgmlType::Q8_0 => {
                let bytes = values.chunks(32).flat_map(|values| {
                    let (scale, codes) = block(values, 127.0);
                    scale
                        .into_iter()
                        .chain(codes.into_iter().map(|code| code as i8 as u8))
                        .collect::<Vec<_>>()
                });
                (8, bytes.collect())
            }
            GgmlType::Q4_0 => {
                let bytes = values.chunks(32).flat_map(|values| {
                    let (scale, codes) = block(values, 7.0);
                    let pair = |place: usize| ((codes[place] + 8) | (codes[place + 16] + 8) << 4) as u8;
                    scale.into_iter().chain((0..16).map(pair)).collect::<Vec<_>>()
                });
                (2, bytes.collect())
            }
            other => panic!("{other:?} is not written"),
        };
        self.tensors.push(Tensor { name: name.into(), shape, kind: number, bytes });
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF\x03\0\0\0".to_vec();
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, value) in &self.metadata {
            text(&mut out, key);
            let list = |out: &mut Vec<u8>, kind: u32, len: usize| {
                out.extend(9u32.to_le_bytes());
                out.extend(kind.to_le_bytes());
                out.extend((len as u64).to_le_bytes());
            };
            match value {
                Kv::U32(value) => out.extend([4u32.to_le_bytes(), value.to_le_bytes()].concat()),
                Kv::F32(value) => out.extend([6u32.to_le_bytes(), value.to_le_bytes()].concat()),
                Kv::Bool(value) => out.extend([&7u32.to_le_bytes()[..], &[u8::from(*value)]].concat()),
                Kv::Text(value) => {
                    out.extend(8u32.to_le_bytes());
                    text(&mut out, value);
                }
                Kv::Texts(values) => {
                    list(&mut out, 8, values.len());
                    values.iter().for_each(|value| text(&mut out, value));
                }
                Kv::I32s(values) => {
                    list(&mut out, 5, values.len());
                    out.extend(values.iter().flat_map(|value| value.to_le_bytes()));
                }
                Kv::Bools(values) => {
                    list(&mut out, 7, values.len());
                    out.extend(values.iter().map(|&value| u8::from(value)));
                }
            }
        }
        let mut offset = 0;
        for tensor in &self.tensors {
            text(&mut out, &tensor.name);
            out.extend((tensor.shape.len() as u32).to_le_bytes());
            tensor.shape.iter().rev().for_each(|&size| out.extend((size as u64).to_le_bytes()));
            out.extend(tensor.kind.to_le_bytes());
            out.extend((offset as u64).to_le_bytes());
            offset += tensor.bytes.len().next_multiple_of(32);
        }
        for tensor in &self.tensors {
            out.resize(out.len().next_multiple_of(32), 0);
            out.extend(&tensor.bytes);
        }
        out.resize(out.len().next_multiple_of(32), 0);
        out
    }
}
