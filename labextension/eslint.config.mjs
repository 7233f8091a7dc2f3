import js from '@eslint/js';
import jupyter from '@jupyter/eslint-plugin';
import prettier from 'eslint-config-prettier';
import tseslint from 'typescript-eslint';

export default tseslint.config(
  { ignores: ['labextension/lib/**', 'labextension/src/generated/**'] },
  js.configs.recommended,
  {
    files: ['labextension/**/*.{ts,tsx}'],
    extends: [...tseslint.configs.recommendedTypeChecked],
    languageOptions: {
      parserOptions: {
        project: './tsconfig.test.json',
        tsconfigRootDir: import.meta.dirname
      }
    },
    rules: {
      '@typescript-eslint/no-explicit-any': 'error',
      '@typescript-eslint/switch-exhaustiveness-check': 'error',
      '@typescript-eslint/naming-convention': [
        'error',
        { selector: 'interface', format: ['PascalCase'], custom: { regex: '^I[A-Z]', match: true } }
      ],
      '@typescript-eslint/no-unused-vars': ['error', { argsIgnorePattern: '^_' }],
      curly: ['error', 'all'],
      eqeqeq: 'error',
      'no-restricted-properties': [
        'error',
        { property: 'innerHTML', message: 'Text from a kernel goes through textContent.' },
        { property: 'outerHTML', message: 'Text from a kernel goes through textContent.' },
        { property: 'insertAdjacentHTML', message: 'Text from a kernel goes through textContent.' }
      ]
    }
  },
  {
    files: ['labextension/src/sidebar/**/*.{ts,tsx}', 'labextension/src/*.ts'],
    plugins: { jupyter },
    rules: {
      ...(jupyter.configs?.recommended?.rules ?? jupyter.configs?.recommended?.[0]?.rules ?? {})
    }
  },
  prettier
);
